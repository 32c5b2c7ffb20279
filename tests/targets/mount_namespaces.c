// Processes of a tree in mount namespaces that they made.
#include "family.h"
#include <dirent.h>
#include <poll.h>
#include <sys/fanotify.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <termios.h>

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

// --- mounts of its own

// All mounts of this process, but for their numbers, and those of devices and peer groups.
static char *mounts_told(void) {
  static char out[1 << 18], line[8192], *lines[1000];
  int count = 0;
  size_t used = 0;
  FILE *file = fopen("/proc/self/mountinfo", "r");
  MUST(file);
  while (count < 1000 && fgets(line, sizeof line, file)) {
    static char told[8192];
    char *word = strtok(line, " \n");
    int n = 0, at = 0;
    for (; word; word = strtok(0, " \n"), at++) {
      char *colon = strchr(word, ':');
      int is_group = at > 5 && colon && (!strncmp(word, "shared:", 7) || !strncmp(word, "master:", 7));
      if (at < 3)
        continue;
      if (is_group)
        *colon = 0;
      n += snprintf(told + n, sizeof told - n, "%s ", word);
    }
    lines[count++] = strdup(told);
  }
  fclose(file);
  for (int i = 0; i < count; i++) // few
    for (int k = i + 1; k < count; k++)
      if (strcmp(lines[i], lines[k]) > 0) {
        char *other = lines[i];
        lines[i] = lines[k];
        lines[k] = other;
      }
  for (int i = 0; i < count; i++) {
    used += snprintf(out + used, sizeof out - used, "%s\n", lines[i]);
    free(lines[i]);
  }
  return out;
}

// What they were before the cut.
static char told[1 << 18];

static void same_mounts(const char *before) {
  const char *now = mounts_told();
  CHECK(!strcmp(before, now));
  if (strcmp(before, now)) {
    writes(path_of("mounts.before"), before);
    writes(path_of("mounts.after"), now);
  }
}

static int is_same(const struct stat *a, const struct stat *b) {
  EQUAL(b->st_mode, a->st_mode);
  EQUAL(b->st_ino, a->st_ino);
  EQUAL(b->st_nlink, a->st_nlink);
  EQUAL(b->st_uid, a->st_uid);
  EQUAL(b->st_gid, a->st_gid);
  EQUAL(b->st_size, a->st_size);
  EQUAL(b->st_rdev, a->st_rdev);
  EQUAL(b->st_mtim.tv_sec, a->st_mtim.tv_sec);
  EQUAL(b->st_mtim.tv_nsec, a->st_mtim.tv_nsec);
  return !failures;
}

static void with_a_file_system(void) {
  const char *names[] = {".",    "data", "hard",        "link",  "empty",   "sparse", "folder", "folder/in it",
                         "fifo", "null", "folder/deep", "mapped", "foll ow", "set"};
  struct stat before[COUNT(names)];
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  MUST(!mkdir(path_of("below"), 0700));
  MUST(!mount("a name", path_of("below"), "tmpfs", MS_NOSUID | MS_NOEXEC, "size=20m,mode=750,nr_inodes=1000"));
  MUST(!chdir(path_of("below")));
  writes("passing", "x"); // whose inode number nobody has any more
  writes("data", "what is in it");
  MUST(!unlink("passing") && !link("data", "hard") && !symlink("data", "link") && !symlink("nowhere/at all", "foll ow"));
  writes("empty", "");
  int sparse = open("sparse", O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  MUST(sparse >= 0 && !ftruncate(sparse, 5 << 20) && pwrite(sparse, "end", 3, (4 << 20) + 5) == 3);
  MUST(!mkdir("folder", 0751) && !mkdir("later", 0700));
  writes("folder/in it", "too");
  MUST(!rename("later", "folder/deep") && !chown("folder", 1234, 4321) && !chmod("folder", 01753));
  MUST(!setxattr("folder", "trusted.name", "value", 5, 0));
  writes("set", "x");
  MUST(!chown("set", 7, 8) && !chmod("set", 06711));
  MUST(!mkfifo("fifo", 0640) && !mknod("null", S_IFCHR | 0600, 0x103));
  int gone = open("gone", O_RDWR | O_CREAT | O_CLOEXEC, 0600), data = open("data", O_RDWR | O_CLOEXEC);
  MUST(gone >= 0 && write(gone, "gone", 4) == 4 && !unlink("gone"));
  MUST(data >= 0 && lseek(data, 5, SEEK_SET) == 5);
  int pipe = open("fifo", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  MUST(pipe >= 0 && write(pipe, "waits", 5) == 5);
  int file = open("mapped", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  MUST(file >= 0 && !ftruncate(file, 3 * PAGE));
  char *mapped = mmap(0, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  MUST(mapped != MAP_FAILED);
  mapped[2 * PAGE] = 77;
  struct sockaddr_un name = {.sun_family = AF_UNIX}, peer;
  MUST(strlen(directory) < 80);
  strcpy(name.sun_path, directory);
  strcat(name.sun_path, "/below/folder/socket");
  int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  MUST(!bind(server, (void *)&name, sizeof name) && !listen(server, 5));
  int notes = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  MUST(inotify_add_watch(notes, "folder", IN_CREATE) == 1);
  MUST(!chdir("folder"));
  struct timespec times[] = {{1000, 11}, {2000, 22}};
  for (size_t i = COUNT(names); i-- > 0;) {
    char path[4200];
    snprintf(path, sizeof path, "../%s", names[i]);
    MUST(!utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW) && !lstat(path, &before[i]));
  }
  char text[100] = {0};
  strcpy(told, mounts_told());
  cut();
  same_mounts(told);
  for (size_t i = 0; i < COUNT(names); i++) {
    char path[4200];
    struct stat now;
    snprintf(path, sizeof path, "../%s", names[i]);
    CHECK(!lstat(path, &now));
    if (!is_same(&before[i], &now))
      say("differs: %s", names[i]);
  }
  EQUAL(read(data, text, 100), 8);
  CHECK(!strcmp(text, "is in it"));
  EQUAL(pread(gone, text, 100, 0), 4);
  EQUAL(read(pipe, text, 100), 5);
  CHECK(!memcmp(text, "waits", 5));
  EQUAL(pread(sparse, text, 100, (4 << 20) + 5), 100);
  CHECK(!memcmp(text, "end\0\0", 5));
  EQUAL(getxattr(".", "trusted.name", text, 100), 5);
  CHECK(!memcmp(text, "value", 5));
  EQUAL(readlink("../foll ow", text, 100), 14);
  mapped[2 * PAGE + 1] = 78;
  EQUAL(pread(file, text, 2, 2 * PAGE), 2);
  CHECK(text[0] == 77 && text[1] == 78);
  CHECK(access(path_of("below/folder/in it"), F_OK) == 0);
  int client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EQUAL(connect(client, (void *)&(struct sockaddr_un){AF_UNIX, "socket"}, sizeof name), 0);
  socklen_t length = sizeof peer;
  EQUAL(getpeername(client, (void *)&peer, &length), 0);
  CHECK(!strcmp(peer.sun_path, name.sun_path));
  EQUAL(fcntl(server, F_SETFL, O_NONBLOCK), 0);
  CHECK(accept(server, 0, 0) >= 0);
  writes("new", "x");
  CHECK(read(notes, told, sizeof told) > 0);
  CHECK(unlink("new") == 0 && unlink("../data") == 0 && unlink("../hard") == 0);
}

// --- terminals of its own

static int new_master(const char *multiplexer, int number) {
  int master = open(multiplexer, O_RDWR | O_NOCTTY | O_CLOEXEC), unlock = 0, got = -1;
  MUST(master >= 0 && !ioctl(master, TIOCSPTLCK, &unlock) && !ioctl(master, TIOCGPTN, &got) && got == number);
  return master;
}

static int interrupted;

static void on_interrupt(int signal) {
  (void)signal;
  interrupted++;
}

// Leads the session of a terminal, in whose foreground is a child of its.
static void in_terminal(long unused) {
  (void)unused;
  MUST(setsid() > 0);
  int slave = open("/dev/pts/1", O_RDWR | O_CLOEXEC);
  MUST(slave >= 0 && dup2(slave, 0) == 0);
  signal(SIGINT, on_interrupt);
  signal(SIGTTOU, SIG_IGN);
  pid_t front = fork();
  MUST(front >= 0 && !setpgid(front, front));
  if (!front) {
    arrive();
    while (!interrupted)
      usleep(1000);
    _exit(7);
  }
  MUST(!tcsetpgrp(slave, front));
  arrive();
  wait_go();
  EQUAL(tcgetpgrp(slave), front);
  EQUAL(tcgetsid(0), getpid());
  CHECK(!strcmp(ttyname(slave), "/dev/pts/1"));
  int here = open("/dev/tty", O_RDWR | O_CLOEXEC);
  EQUAL(write(here, "ready", 5), 5);
  int status;
  EQUAL(waitpid(front, &status, 0), front); // who is at the master interrupts it
  EQUAL(WEXITSTATUS(status), 7);
  EQUAL(interrupted, 0);
}

// One terminal has the number of one outside, and nobody in it; in the other one there is a session.
static void terminals(void) {
  open_board();
  int outside = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC), unlock = 0;
  MUST(outside >= 0 && !ioctl(outside, TIOCSPTLCK, &unlock));
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  MUST(!mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5"));
  MUST(!mount("/dev/pts/ptmx", "/dev/ptmx", 0, MS_BIND, 0) || errno == ENOENT);
  int masters[2] = {new_master("/dev/pts/ptmx", 0), new_master("/dev/ptmx", 1)};
  int slave = open("/dev/pts/0", O_RDWR | O_NOCTTY | O_CLOEXEC);
  struct winsize size = {33, 77, 5, 6}, seen = {0};
  MUST(slave >= 0 && !ioctl(masters[0], TIOCSWINSZ, &size));
  struct stat of;
  MUST(!fchown(slave, 1234, 4321) && !fchmod(slave, 0622));
  pid_t pid = child(in_terminal, 0);
  await_arrivals(2);
  cut();
  char text[64] = {0};
  int number = -1;
  for (int i = 0; i < 2; i++) {
    EQUAL(ioctl(masters[i], TIOCGPTN, &number), 0);
    EQUAL(number, i);
  }
  EQUAL(ioctl(slave, TIOCGWINSZ, &seen), 0);
  CHECK(!memcmp(&size, &seen, sizeof size));
  CHECK(!strcmp(ttyname(slave), "/dev/pts/0"));
  CHECK(!fstat(slave, &of) && of.st_uid == 1234 && of.st_gid == 4321 && (of.st_mode & 07777) == 0622);
  EQUAL(write(masters[0], "typed\n", 6), 6);
  EQUAL(read(slave, text, sizeof text), 6);
  CHECK(!memcmp(text, "typed\n", 6));
  EQUAL(read(masters[1], text, sizeof text), 5);
  CHECK(!memcmp(text, "ready", 5));
  EQUAL(write(masters[1], "\3", 1), 1);
  await_ok(pid);
  CHECK(open("/dev/pts/0", O_RDWR | O_NOCTTY | O_CLOEXEC) >= 0);
  close(new_master("/dev/ptmx", 2));
  EQUAL(ioctl(outside, TIOCGPTN, &number), 0);
}

// Watched by fanotify: a mount, the file system of another one, a file in it.
static void marked(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  const char *names[] = {"mount", "system"};
  int groups[2];
  for (int i = 0; i < 2; i++) {
    groups[i] = fanotify_init(FAN_CLASS_NOTIF | FAN_CLOEXEC | FAN_NONBLOCK, O_RDONLY);
    if (groups[i] < 0)
      SKIP("no fanotify here");
    MUST(!mkdir(path_of(names[i]), 0700) && !mount("marked", path_of(names[i]), "tmpfs", 0, "size=5m"));
    MUST(!chdir(path_of(names[i])));
    writes("file", "x");
    int ignored = fanotify_mark(groups[i], FAN_MARK_ADD | FAN_MARK_IGNORED_MASK | FAN_MARK_IGNORED_SURV_MODIFY, FAN_OPEN,
                                AT_FDCWD, "file");
    int told = fanotify_mark(groups[i], FAN_MARK_ADD | (i ? FAN_MARK_FILESYSTEM : FAN_MARK_MOUNT), FAN_OPEN | FAN_CLOSE_WRITE,
                             AT_FDCWD, ".");
    MUST(!ignored && !told);
  }
  MUST(!mkdir(path_of("elsewhere"), 0700));
  // By another mount of the same file system its files are told of, too.
  char path[5000], other[4096];
  snprintf(other, sizeof other, "%s", path_of("elsewhere"));
  MUST(!mount(path_of("system"), other, 0, MS_BIND, 0));
  MUST(!chdir("/"));
  cut();
  for (int i = 0; i < 2; i++) {
    struct fanotify_event_metadata event;
    EQUAL(read(groups[i], &event, sizeof event), -1);
    EQUAL(errno, EAGAIN);
    snprintf(path, sizeof path, "%s/file", path_of(i ? "elsewhere" : names[i]));
    writes(path, "y");
    EQUAL(read(groups[i], &event, sizeof event), sizeof event);
    EQUAL(event.mask, FAN_CLOSE_WRITE); // that it was opened is ignored
    close(event.fd);
    snprintf(path, sizeof path, "%s/new", path_of(names[i]));
    writes(path, "y");
    EQUAL(read(groups[i], &event, sizeof event), sizeof event);
    EQUAL(event.mask, FAN_OPEN | FAN_CLOSE_WRITE);
    struct stat it, opened;
    CHECK(!stat(path, &it) && !fstat(event.fd, &opened) && it.st_ino == opened.st_ino && it.st_dev == opened.st_dev);
    close(event.fd);
  }
}

// Of directories and of files, with options of their own; some that are around it changed, and taken away.
static void bound(void) {
  char here[4096], there[4096];
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  snprintf(here, sizeof here, "%s", path_of("here"));
  snprintf(there, sizeof there, "%s", path_of("there"));
  MUST(!mkdir(here, 0700) && !mkdir(there, 0700) && !mkdir(path_of("third"), 0700));
  writes(path_of("one"), "one");
  writes(path_of("two"), "two");
  writes(path_of("here/inner"), "inner");
  MUST(!mount(here, there, 0, MS_BIND, 0));
  MUST(!mount(0, there, 0, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME, 0));
  MUST(!mount(here, path_of("third"), 0, MS_BIND, 0));
  MUST(!mount(0, path_of("third"), 0, MS_REMOUNT | MS_BIND | MS_RDONLY, 0));
  snprintf(here, sizeof here, "%s", path_of("one"));
  MUST(!mount(here, path_of("two"), 0, MS_BIND, 0));
  MUST(!mount(0, "/dev/shm", 0, MS_REMOUNT | MS_BIND | MS_NOEXEC | MS_NOSUID, 0));
  MUST(!umount2("/dev/pts", MNT_DETACH));
  int file = open(path_of("there/inner"), O_RDWR | O_CLOEXEC), folder = open(there, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  MUST(file >= 0 && folder >= 0 && !chdir(path_of("third")));
  strcpy(told, mounts_told());
  cut();
  same_mounts(told);
  char text[10] = {0};
  EQUAL(read(file, text, 9), 5);
  EQUAL(openat(folder, "inner", O_RDONLY) >= 0, 1);
  EQUAL(open("inner", O_WRONLY), -1);
  EQUAL(errno, EROFS);
  file = open(path_of("two"), O_RDONLY);
  EQUAL(read(file, text, 3), 3);
  CHECK(!memcmp(text, "one", 3));
  writes(path_of("there/file"), "x");
  CHECK(!access(path_of("here/file"), F_OK) && !access("file", F_OK));
}

// File systems of which the machine has one each.
static void of_the_machine(void) {
  static const char *const kinds[] = {"debugfs", "tracefs", "securityfs", "pstore", "fusectl", "configfs", "binfmt_misc"};
  struct stat then[COUNT(kinds)], now;
  struct statfs system[COUNT(kinds)], system_now;
  int mounted[COUNT(kinds)], any = 0;
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  for (size_t i = 0; i < COUNT(kinds); i++) {
    MUST(!mkdir(path_of(kinds[i]), 0700));
    mounted[i] = !mount("it", path_of(kinds[i]), kinds[i], MS_NOSUID | MS_NOEXEC, 0);
    any += mounted[i];
    MUST(!mounted[i] || (!stat(path_of(kinds[i]), &then[i]) && !statfs(path_of(kinds[i]), &system[i])));
  }
  if (!any)
    SKIP("none of them can be mounted");
  strcpy(told, mounts_told());
  cut();
  same_mounts(told);
  for (size_t i = 0; i < COUNT(kinds); i++)
    if (mounted[i]) {
      EQUAL(stat(path_of(kinds[i]), &now), 0);
      EQUAL(now.st_mode, then[i].st_mode);
      EQUAL(statfs(path_of(kinds[i]), &system_now), 0);
      EQUAL(system_now.f_type, system[i].f_type);
    }
}

// --- another root

static void makes(const char *path) {
  MUST(!mkdir(path, 0755));
}

static void binds(const char *from, const char *to, unsigned long flags) {
  MUST(!mount(from, to, 0, MS_BIND, 0) && !mount(0, to, 0, MS_REMOUNT | MS_BIND | flags, 0));
}

static void in_another_root(long own_processes) {
  char text[100] = {0};
  share(MS_PRIVATE);
  MUST(!mkdir(path_of("root"), 0755) && !mount("root", path_of("root"), "tmpfs", 0, "mode=755"));
  MUST(!chdir(path_of("root")));
  makes("usr"), makes("lib"), makes("lib64"), makes("proc"), makes("dev"), makes("dev/shm"), makes("tmp"), makes("old");
  makes("desk");
  binds("/usr", "usr", MS_RDONLY), binds("/lib", "lib", MS_RDONLY);
  if (!access("/lib64", F_OK))
    binds("/lib64", "lib64", MS_RDONLY | MS_NOSUID);
  writes("dev/null", "");
  binds("/dev/null", "dev/null", MS_NOEXEC);
  binds(directory, "desk", 0);
  MUST(!mount("tmp", "tmp", "tmpfs", MS_NOSUID, "size=1m"));
  MUST(!mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0));
  if (own_processes)
    MUST(!mount("proc/sys", "proc/sys", 0, MS_BIND, 0) && !mount(0, "proc/sys", 0, MS_REMOUNT | MS_BIND | MS_RDONLY, 0));
  MUST(!syscall(SYS_pivot_root, ".", "old") && !chdir("/") && !umount2("/old", MNT_DETACH) && !rmdir("/old"));
  strcpy(directory, "/desk");
  snprintf(go_path, sizeof go_path, "/desk/go");
  writes("/tmp/file", "in the middle");
  int file = open("/tmp/file", O_RDWR | O_CLOEXEC), null = open("/dev/null", O_RDWR | O_CLOEXEC);
  int root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC), log = open("/desk/log", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  MUST(file >= 0 && null >= 0 && root >= 0 && log >= 0 && !chdir("/tmp"));
  pid_t pid = child(waits, 0);
  strcpy(told, mounts_told());
  arrive();
  wait_go();
  same_mounts(told);
  EQUAL(read(file, text, 100), 13);
  EQUAL(write(null, "x", 1), 1);
  EQUAL(write(log, "x", 1), 1);
  CHECK(!faccessat(root, "tmp/file", F_OK, 0) && !faccessat(root, "desk/log", F_OK, 0) && !access("file", F_OK));
  CHECK(access("/etc", F_OK) && access("/old", F_OK));
  CHECK(getcwd(text, 100) && !strcmp(text, "/tmp"));
  EQUAL(open("/usr/new", O_WRONLY | O_CREAT, 0600), -1);
  EQUAL(errno, EROFS);
  if (own_processes) {
    EQUAL(processes_shown(), 2);
    EQUAL(open("/proc/sys/kernel/hostname", O_WRONLY), -1);
    EQUAL(errno, EROFS);
  } else {
    CHECK(processes_shown() > 2);
  }
  await_ok(pid);
}

static void other_root(void) {
  open_board();
  pid_t pid = child_in(CLONE_NEWNS, in_another_root, 0);
  await_arrivals(2);
  cut();
  await_ok(pid);
}

static void other_root_and_processes(void) {
  open_board();
  pid_t pid = child_in(CLONE_NEWNS | CLONE_NEWPID, in_another_root, 1);
  await_arrivals(2);
  cut();
  await_ok(pid);
}

// Changed in the midst of a namespace.
static void changed_root(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  MUST(!mkdir(path_of("root"), 0755) && !mount("root", path_of("root"), "tmpfs", 0, 0) && !chdir(path_of("root")));
  makes("inner"), makes("inner/proc"), makes("inner/desk");
  binds(directory, "inner/desk", 0);
  MUST(!mount("proc", "inner/proc", "proc", 0, 0) && !chroot("inner") && !chdir("/desk"));
  strcpy(directory, "/desk");
  snprintf(go_path, sizeof go_path, "/desk/go");
  strcpy(told, mounts_told());
  cut();
  same_mounts(told);
  CHECK(access("/usr", F_OK) && !access("/proc/self/status", F_OK));
  writes("/kept", "x");
  CHECK(!access("go", F_OK) && !access("../kept", F_OK) && !access("/../kept", F_OK));
}

// --- what is passed on

static void passing_on(void) {
  char one[4096];
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  const char *names[] = {"one", "peer", "receives", "part", "alone", "unbindable"};
  for (size_t i = 0; i < COUNT(names); i++)
    MUST(!mkdir(path_of(names[i]), 0700));
  snprintf(one, sizeof one, "%s", path_of("one"));
  MUST(!mount("one", one, "tmpfs", 0, 0) && !mount(0, one, 0, MS_SHARED, 0));
  MUST(!mkdir(path_of("one/sub"), 0700) && !mkdir(path_of("one/sub/deep"), 0700));
  MUST(!mount(one, path_of("peer"), 0, MS_BIND, 0) && !mount(one, path_of("receives"), 0, MS_BIND, 0));
  MUST(!mount(0, path_of("receives"), 0, MS_SLAVE, 0) && !mount(0, path_of("receives"), 0, MS_SHARED, 0));
  char sub[4200];
  snprintf(sub, sizeof sub, "%s/sub", one);
  MUST(!mount(sub, path_of("part"), 0, MS_BIND, 0) && !mount(0, path_of("part"), 0, MS_SLAVE, 0));
  MUST(!mount(one, path_of("alone"), 0, MS_BIND, 0) && !mount(0, path_of("alone"), 0, MS_PRIVATE, 0));
  MUST(!mount("u", path_of("unbindable"), "tmpfs", 0, 0) && !mount(0, path_of("unbindable"), 0, MS_UNBINDABLE, 0));
  MUST(!mount(0, "/dev", 0, MS_SHARED, 0));
  strcpy(told, mounts_told());
  cut();
  same_mounts(told);
  EQUAL(mount("two", path_of("peer/sub/deep"), "tmpfs", 0, 0), 0);
  writes(path_of("one/sub/deep/file"), "x");
  CHECK(!access(path_of("peer/sub/deep/file"), F_OK) && !access(path_of("receives/sub/deep/file"), F_OK));
  CHECK(!access(path_of("part/deep/file"), F_OK) && access(path_of("alone/sub/deep/file"), F_OK));
  EQUAL(mount("three", path_of("part/deep"), "tmpfs", 0, 0), 0);
  writes(path_of("part/deep/other"), "x");
  CHECK(access(path_of("one/sub/deep/other"), F_OK));
}

// --- overlays

static void overlay(const char *point, const char *options) {
  if (mount("over", point, "overlay", 0, options)) {
    if (errno == ENODEV || errno == EPERM)
      SKIP("no overlays here");
    say("overlay %s on %s", options, point);
    MUST(0);
  }
}

static void reads(int fd, const char *expected) {
  char text[100] = {0};
  EQUAL(pread(fd, text, 99, 0), strlen(expected));
  CHECK(!strcmp(text, expected));
}

static void holds(const char *path, const char *expected) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  CHECK(fd >= 0);
  reads(fd, expected);
  close(fd);
}

// What a program does on one, whatever it lies over: files that are only read, copied up, made anew, removed; mapped.
static void works_on_it(const char *point) {
  struct stat before, now;
  MUST(!chdir(point));
  int lower = open("folder/read", O_RDONLY | O_CLOEXEC), copied = open("copied", O_RDWR | O_CLOEXEC);
  MUST(lower >= 0 && copied >= 0 && pwrite(copied, "up", 2, 0) == 2);
  writes("made", "anew");
  int made = open("made", O_RDWR | O_APPEND | O_CLOEXEC), gone = open("gone", O_RDWR | O_CLOEXEC);
  int gone_too = open("gone too", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  MUST(made >= 0 && gone >= 0 && !unlink("gone"));
  MUST(gone_too >= 0 && write(gone_too, "kept", 4) == 4 && !unlink("gone too"));
  int mapped = open("mapped", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  MUST(!ftruncate(mapped, 2 * PAGE));
  char *shared = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, mapped, 0);
  char *private = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, lower, 0);
  MUST(shared != MAP_FAILED && private != MAP_FAILED && !memcmp(private, "below", 5));
  shared[PAGE] = 77;
  MUST(!chdir("folder") && !stat("../made", &before));
  strcpy(told, mounts_told());
  cut();
  same_mounts(told);
  CHECK(!stat("../made", &now) && is_same(&before, &now));
  reads(copied, "up low");
  reads(lower, "below"), reads(gone, "removed"), reads(gone_too, "kept");
  EQUAL(write(made, "!", 1), 1);
  holds("../made", "anew!"), holds("../copied", "up low");
  CHECK(access("../gone", F_OK) && access("../gone too", F_OK) && !memcmp(private, "below", 5));
  shared[PAGE + 1] = 78;
  char text[2];
  EQUAL(pread(mapped, text, 2, PAGE), 2);
  CHECK(text[0] == 77 && text[1] == 78);
  writes("read", "up");
  holds("read", "uplow");
}

// Directories to lie over: lower, with files in it, another one that is below that, upper, work.
static void has_memory(void) {
  MUST(!chdir(directory));
  makes("memory");
  MUST(!mount("memory", "memory", "tmpfs", 0, 0));
}

static void makes_layers(const char *on) {
  MUST(!chdir(on));
  makes("lower"), makes("lower/folder"), makes("be low,:er"), makes("be low,:er/folder"), makes("upper"), makes("work");
  writes("lower/folder/read", "below"), writes("be low,:er/gone", "removed"), writes("be low,:er/copied", "as low");
  writes("be low,:er/folder/read", "hidden"), writes("lower/other", "other");
  MUST(!chdir(directory));
  makes("merged");
}

#define RELATIVE "lowerdir=lower:be low\\,\\:er,upperdir=upper,workdir=work"

static void over_directories(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  makes_layers(directory);
  overlay("merged", RELATIVE);
  makes("bound"), makes("merged/folder/deep");
  binds("merged/folder/deep", "bound", MS_NOEXEC);
  works_on_it("merged");
  CHECK(!access(path_of("upper/made"), F_OK) && !access(path_of("bound"), F_OK));
  writes(path_of("bound/file"), "x");
  CHECK(!access("deep/file", F_OK));
}

// All of them in a file system in memory that goes with the namespace.
static void over_memory(void) {
  char options[16384];
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  has_memory();
  makes_layers("memory");
  snprintf(options, sizeof options, "lowerdir=%s/memory/lower:%s/memory/be low\\,\\:er,upperdir=memory/upper,workdir=memory/work",
           directory, directory);
  overlay("merged", options);
  works_on_it("merged");
}

// Read from a disk, and written in memory.
static void lies_over_both(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  makes_layers(directory);
  has_memory();
  makes("memory/upper"), makes("memory/work");
  overlay("merged", "lowerdir=lower:be low\\,\\:er,upperdir=memory/upper,workdir=memory/work");
}

static void over_both(void) {
  lies_over_both();
  works_on_it("merged");
}

static ino_t number_of(int fd) {
  struct stat s;
  MUST(!fstat(fd, &s));
  return s.st_ino;
}

// Directories of one over several file systems have numbers by the order in which somebody came to them first. A program that has
// looked at some of them tells them from others by these.
static void numbered_directories(void) {
  lies_over_both();
  MUST(!chdir("merged"));
  const char *paths[] = {".", "one", "one/within", "folder", "one/within/deep", "late"};
  int fds[COUNT(paths)];
  ino_t numbers[COUNT(paths)];
  for (size_t i = 0; i < COUNT(paths); i++) {
    for (size_t k = 0; k < 3 * i; k++)
      MUST(!mkdir("passing", 0700) && !rmdir("passing"));
    if (access(paths[i], F_OK))
      makes(paths[i]);
    fds[i] = open(paths[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    MUST(fds[i] >= 0);
    numbers[i] = number_of(fds[i]);
  }
  MUST(!mkdir("moved", 0700));
  int moved = open("moved", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  MUST(moved >= 0 && !mkdir("later", 0700) && !rename("moved", "later/moved") && !chdir("one"));
  int later = open("../later", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  MUST(later >= 0);
  ino_t number_of_later = number_of(later);
  cut();
  for (size_t i = 0; i < COUNT(paths); i++)
    EQUAL(number_of(fds[i]), numbers[i]);
  EQUAL(number_of(later), number_of_later);
  CHECK(!mkdir("new", 0700));
  int fresh[] = {open("new", O_RDONLY | O_DIRECTORY | O_CLOEXEC), moved};
  CHECK(fresh[0] >= 0 && number_of(fresh[0]) != number_of(moved));
  for (size_t i = 0; i < COUNT(paths); i++)
    CHECK(number_of(fresh[0]) != numbers[i] && number_of(moved) != numbers[i]);
}

static void over_read_only(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  makes_layers(directory);
  overlay("merged", "lowerdir=lower:be low\\,\\:er");
  int file = open("merged/copied", O_RDONLY | O_CLOEXEC);
  MUST(file >= 0 && !chdir("merged/folder"));
  strcpy(told, mounts_told());
  cut();
  same_mounts(told);
  reads(file, "as low");
  holds("read", "below");
  EQUAL(open("new", O_WRONLY | O_CREAT, 0600), -1);
  EQUAL(errno, EROFS);
}

// The whole root below, what is changed in memory, and that for a root.
static void over_the_root(void) {
  char path[4200];
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  has_memory();
  MUST(!chdir("memory"));
  makes("upper"), makes("work"), makes("merged");
  overlay("merged", "lowerdir=/,upperdir=upper,workdir=work");
  snprintf(path, sizeof path, "merged%s", directory);
  if (access(path, F_OK))
    SKIP("the directory of the test is on another file system than the root");
  binds(directory, path, 0);
  MUST(!mount("/proc", "merged/proc", 0, MS_BIND, 0) && !mount("/dev", "merged/dev", 0, MS_BIND, 0));
  snprintf(path, sizeof path, "merged%s/memory", directory);
  MUST(!mount(".", path, 0, MS_BIND, 0));
  MUST(!chdir("merged") && !syscall(SYS_pivot_root, ".", "mnt") && !chdir("/") && !umount2("/mnt", MNT_DETACH));
  writes("/of the test", "it");
  int file = open("/of the test", O_RDONLY | O_CLOEXEC);
  strcpy(told, mounts_told());
  cut();
  same_mounts(told);
  reads(file, "it");
  holds("/of the test", "it");
  MUST(!unlink("/of the test"));
}

// By somebody who is the superuser of a user namespace only.
static void over_users(void) {
  enter_new(CLONE_NEWNS | CLONE_NEWUSER);
  writes("/proc/self/uid_map", "0 0 1");
  writes("/proc/self/setgroups", "deny");
  writes("/proc/self/gid_map", "0 0 1");
  share(MS_PRIVATE);
  has_memory();
  makes_layers(directory);
  overlay("merged", RELATIVE ",userxattr");
  works_on_it("merged");
}

static void volatile_overlay(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  makes_layers(directory);
  overlay("merged", RELATIVE ",volatile");
  cut();
  CHECK(!access("merged/copied", F_OK));
}

// A mapping shows what is below a file that has been copied up and changed since.
static void shows_what_was(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  makes_layers(directory);
  overlay("merged", RELATIVE);
  int file = open("merged/copied", O_RDONLY | O_CLOEXEC), same = open("merged/other", O_RDONLY | O_CLOEXEC);
  MUST(file >= 0 && same >= 0);
  char *old = mmap(0, PAGE, PROT_READ, MAP_PRIVATE, file, 0), *kept = mmap(0, PAGE, PROT_READ, MAP_PRIVATE, same, 0);
  MUST(old != MAP_FAILED && kept != MAP_FAILED);
  MUST(!chmod("merged/other", 0640)); // what is in it is the same as below
  writes("merged/copied", "new");
  cut();
  EQUAL(strcmp(old, "as low"), 0);
  EQUAL(strcmp(kept, "other"), 0);
}

// Its names lead to other directories by now: the kernel still has the old one below.
static void moved_overlay(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  makes_layers(directory);
  overlay("merged", "lowerdir=lower:be low\\,\\:er");
  MUST(!rename("be low,:er", "elsewhere"));
  makes("be low,:er");
  cut();
  CHECK(!access("merged/copied", F_OK));
}

// --- what must be refused

// A file system that is nowhere around, one that is too large, what is hidden, and several of them at once.
static void hidden(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  MUST(!mkdir(path_of("below"), 0700) && !mkdir(path_of("many"), 0700));
  MUST(!mount("tmpfs", path_of("below"), "tmpfs", 0, 0));
  writes(path_of("below/file"), "x");
  MUST(!mount("tmpfs", path_of("below"), "tmpfs", 0, 0) && !mount("ramfs", path_of("many"), "ramfs", 0, 0));
  cut();
  CHECK(access(path_of("below/file"), F_OK));
}

static void large(void) {
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  MUST(!mkdir(path_of("below"), 0700) && !mount("tmpfs", path_of("below"), "tmpfs", 0, "size=2g"));
  int file = open(path_of("below/file"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || fallocate(file, 0, 0, (1 << 30) + PAGE))
    SKIP("there is no room for it");
  cut();
  CHECK(!access(path_of("below/file"), F_OK));
}

// Somebody who is not part of the program has a file of it open.
static void lent(void) {
  int around = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  MUST(!mkdir(path_of("below"), 0700) && !mount("tmpfs", path_of("below"), "tmpfs", 0, 0));
  writes(path_of("below/file"), "x");
  pid_t pid = fork();
  if (!pid) {
    if (fork())
      _exit(0);
    setsid();
    MUST(open(path_of("below/file"), O_RDONLY) >= 0);
    MUST(around >= 0 && !setns(around, CLONE_NEWNS));
    close(around), close(0), close(1), close(2);
    while (access(go_path, F_OK))
      nap(0.01);
    _exit(0);
  }
  MUST(waitpid(pid, 0, 0) == pid);
  close(around);
  nap(0.2);
  cut();
}

static void keeps_it(long unused) {
  (void)unused;
  enter_new(CLONE_NEWNS);
  arrive();
  wait_go();
}

static void in_two(void) {
  open_board();
  enter_new(CLONE_NEWNS);
  share(MS_PRIVATE);
  MUST(!mkdir(path_of("below"), 0700) && !mount("tmpfs", path_of("below"), "tmpfs", 0, 0));
  pid_t pid = child(keeps_it, 0);
  await_arrivals(1);
  cut();
  await_ok(pid);
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
          {"with_a_file_system", with_a_file_system}, {"bound", bound}, {"of_the_machine", of_the_machine}, {"other_root", other_root},
          {"other_root_and_processes", other_root_and_processes}, {"changed_root", changed_root},
          {"passing_on", passing_on}, {"over_directories", over_directories}, {"over_memory", over_memory},
          {"over_both", over_both}, {"over_read_only", over_read_only}, {"over_the_root", over_the_root},
          {"over_users", over_users}, {"numbered_directories", numbered_directories}, {"volatile_overlay", volatile_overlay}, {"moved_overlay", moved_overlay},
          {"shows_what_was", shows_what_was}, {"marked", marked}, {"terminals", terminals},
          {"hidden", hidden}, {"large", large}, {"in_two", in_two}, {"lent", lent},
          {"in_its_own_proc", in_its_own_proc}, {"holds_another_proc", holds_another_proc})
