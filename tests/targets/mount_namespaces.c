// Processes of a tree in mount namespaces that they made.
#include "family.h"
#include <dirent.h>
#include <sys/mount.h>

static ino_t space(const char *pid) {
  char path[64];
  struct stat s;
  snprintf(path, sizeof path, "/proc/%s/ns/mnt", pid);
  return stat(path, &s) ? 0 : s.st_ino;
}

static void share(unsigned long flags) {
  MUST(!mount(0, "/", 0, MS_REC | flags, 0));
}

static void writes(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  MUST(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
  close(fd);
}

// --- a copy of the mounts around

static void shares_it(long unused) {
  (void)unused;
  arrive();
  wait_go();
  await_arrivals(20);
  CHECK(!access("below/inside", F_OK)); // its directory is that of the one who made it
}

static void in_a_copy(long unused) {
  (void)unused;
  share(MS_PRIVATE);
  MUST(!chdir(directory) && !mkdir("below", 0700));
  int fd = open(path_of("open"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  MUST(fd >= 0 && write(fd, "before", 6) == 6);
  pid_t pid = child(shares_it, 0);
  arrive();
  wait_go();
  char text[6];
  EQUAL(pread(fd, text, 6, 0), 6);
  CHECK(!memcmp(text, "before", 6));
  CHECK(!access("open", F_OK) && !access(path_of("open"), F_OK));
  EQUAL(mount("tmpfs", "below", "tmpfs", 0, 0), 0);
  writes("below/inside", "it");
  board->arrived = 20;
  await_ok(pid);
  arrive();
  await_arrivals(30);
}

static void copied(void) {
  open_board();
  char number[20];
  pid_t pid = child_in(CLONE_NEWNS, in_a_copy, 0);
  snprintf(number, sizeof number, "%d", pid);
  await_arrivals(2);
  CHECK(space("self") != space(number));
  cut();
  CHECK(space("self") != space(number));
  await_arrivals(21);
  CHECK(!access(path_of("below"), F_OK) && access(path_of("below/inside"), F_OK) < 0);
  board->arrived = 30;
  await_ok(pid);
}

// All of the program is in it.
static void entered(void) {
  enter_new(CLONE_NEWNS);
  share(MS_SLAVE);
  cut();
  MUST(!mkdir(path_of("below"), 0700));
  EQUAL(mount("tmpfs", path_of("below"), "tmpfs", 0, 0), 0);
  writes(path_of("below/file"), "x");
  EQUAL(umount(path_of("below")), 0);
  CHECK(access(path_of("below/file"), F_OK) < 0);
}

// --- with procfs of a pid namespace

static int processes_shown(void) {
  DIR *all = opendir("/proc");
  int n = 0;
  MUST(all);
  for (struct dirent *entry; (entry = readdir(all));)
    n += entry->d_name[0] >= '1' && entry->d_name[0] <= '9';
  closedir(all);
  return n;
}

static void waits(long unused) {
  (void)unused;
  arrive();
  wait_go();
}

static void sees_its_own(void) {
  char name[20] = {0};
  EQUAL(readlink("/proc/self", name, sizeof name - 1) > 0, 1);
  CHECK(!strcmp(name, "1"));
  EQUAL(processes_shown(), 2);
}

static void with_its_own_proc(long unused) {
  (void)unused;
  share(MS_PRIVATE);
  MUST(!mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0));
  pid_t pid = child(waits, 0);
  await_arrivals(1);
  sees_its_own();
  arrive();
  await_arrivals(10);
  EQUAL(getpid(), 1);
  char status[64];
  snprintf(status, sizeof status, "/proc/%d/status", pid);
  board->arrived++;
  await_arrivals(12);
  EQUAL(processes_shown(), 1 + !access(status, F_OK));
  await_ok(pid);
  CHECK(access(status, F_OK) < 0);
  EQUAL(processes_shown(), 1);
}

static void with_proc(void) {
  open_board();
  pid_t pid = child_in(CLONE_NEWNS | CLONE_NEWPID, with_its_own_proc, 0);
  await_arrivals(2);
  cut();
  CHECK(processes_shown() > 2);
  board->arrived = 10;
  await_arrivals(11);
  board->arrived = 12;
  await_ok(pid);
}

// --- what must be refused

static void with_a_file_system(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  MUST(!mkdir(path_of("below"), 0700) && !mount("tmpfs", path_of("below"), "tmpfs", 0, 0));
  writes(path_of("below/file"), "kept");
  cut();
  CHECK(!access(path_of("below/file"), F_OK));
}

static void bound(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  MUST(!mkdir(path_of("here"), 0700) && !mkdir(path_of("there"), 0700));
  char here[4096];
  snprintf(here, sizeof here, "%s", path_of("here"));
  MUST(!mount(here, path_of("there"), 0, MS_BIND, 0));
  cut();
  writes(path_of("there/file"), "x");
  CHECK(!access(path_of("here/file"), F_OK));
}

static void stands_in_proc(long unused) {
  (void)unused;
  share(MS_PRIVATE);
  MUST(!mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0) && !chdir("/proc/1"));
  arrive();
  wait_go();
  CHECK(!access("status", F_OK));
}

static void in_its_own_proc(void) {
  open_board();
  pid_t pid = child_in(CLONE_NEWNS | CLONE_NEWPID, stands_in_proc, 0);
  await_arrivals(1);
  cut();
  await_ok(pid);
}

static void holds_proc(long unused) {
  (void)unused;
  share(MS_PRIVATE);
  int outer = open("/proc/uptime", O_RDONLY);
  MUST(outer >= 0);
  MUST(!mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0));
  arrive();
  wait_go();
  char c;
  EQUAL(read(outer, &c, 1), 1);
}

static void holds_another_proc(void) {
  open_board();
  pid_t pid = child_in(CLONE_NEWNS | CLONE_NEWPID, holds_proc, 0);
  await_arrivals(1);
  cut();
  await_ok(pid);
}

SCENARIOS({"copied", copied}, {"entered", entered}, {"with_proc", with_proc},
          {"with_a_file_system", with_a_file_system}, {"bound", bound}, {"in_its_own_proc", in_its_own_proc},
          {"holds_another_proc", holds_another_proc})
