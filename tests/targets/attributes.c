// Attributes of the process: what it is, where it is, what it may do.
#include "target.h"
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/un.h>
#include <sys/socket.h>
#include <linux/securebits.h>
#include <stdatomic.h>
#include <sys/auxv.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/utsname.h>

// --- identity


static void identity(void) {
  static const char *names[] = {"/proc/self/cmdline", "/proc/self/environ", "/proc/self/auxv", "/proc/self/comm"};
  char *before[4], exe_before[4096] = {0}, exe_after[4096] = {0};
  size_t length[4];
  for (int i = 0; i < 4; i++)
    before[i] = contents(names[i], &length[i]);
  MUST(readlink("/proc/self/exe", exe_before, sizeof exe_before - 1) > 0);
  pid_t pid = getpid(), group = getpgrp(), session = getsid(0);
  cut();
  for (int i = 0; i < 4; i++) {
    size_t n = 0;
    char *after = contents(names[i], &n);
    EQUAL(n, length[i]);
    if (n != length[i] || memcmp(after, before[i], n))
      CHECK(!names[i]);
  }
  CHECK(readlink("/proc/self/exe", exe_after, sizeof exe_after - 1) > 0);
  CHECK(!strcmp(exe_before, exe_after));
  EQUAL(getpid(), pid);
  EQUAL(getsid(0), session);
  EQUAL(getpgrp(), group);
  CHECK(getauxval(AT_SYSINFO_EHDR) != 0);
}

static void renamed(void) { // the name, and a command line that was written over
  prctl(PR_SET_NAME, "other name");
  char *line = contents("/proc/self/cmdline", 0);
  cut();
  char name[16];
  prctl(PR_GET_NAME, name);
  CHECK(!strcmp(name, "other name"));
  CHECK(!strcmp(contents("/proc/self/cmdline", 0), line));
  CHECK(!strcmp(contents("/proc/self/comm", 0), "other name\n"));
}

// --- time without system calls, and never backwards

static volatile int stop;

static void *clock_thread(void *unused) {
  double last[3] = {0};
  static const clockid_t clocks[3] = {CLOCK_MONOTONIC, CLOCK_BOOTTIME, CLOCK_MONOTONIC_RAW};
  while (!stop)
    for (int i = 0; i < 3; i++) {
      double t = seconds(clocks[i]);
      CHECK(t >= last[i]);
      last[i] = t;
    }
  return unused;
}

static void clocks(void) {
  double real = seconds(CLOCK_REALTIME), own = seconds(CLOCK_PROCESS_CPUTIME_ID);
  pthread_t t[2] = {spawn(clock_thread, 0), spawn(clock_thread, 0)};
  nap(0.05);
  cut();
  nap(0.05);
  stop = 1;
  pthread_join(t[0], 0);
  pthread_join(t[1], 0);
  CHECK(seconds(CLOCK_REALTIME) > real && seconds(CLOCK_REALTIME) - real < 600);
  double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
  if (cpu < own)
    say("note: the CPU time starts over");
  struct timeval now_coarse;
  EQUAL(gettimeofday(&now_coarse, 0), 0);
  unsigned cpu_number = 77777;
  EQUAL(syscall(SYS_getcpu, &cpu_number, 0, 0), 0);
  CHECK(sched_getcpu() >= 0);
}

// --- places

static void directories(void) {
  MUST(mkdir(path_of("deep"), 0755) == 0 && chdir(path_of("deep")) == 0);
  umask(027);
  cut();
  char here[4096];
  CHECK(getcwd(here, sizeof here) && !strcmp(here, path_of("deep")));
  int fd = open("made", O_CREAT | O_WRONLY, 0777);
  CHECK(fd >= 0);
  struct stat s;
  fstat(fd, &s);
  EQUAL(s.st_mode & 07777, 0750);
  EQUAL(umask(0), 027);
}

static void changed_root(void) {
  MUST(mkdir(path_of("root"), 0755) == 0 && mkdir(path_of("root/inside"), 0755) == 0);
  int out = open(directory, O_RDONLY | O_DIRECTORY), before = socket(AF_UNIX, SOCK_STREAM, 0);
  struct sockaddr_un outside = {.sun_family = AF_UNIX};
  snprintf(outside.sun_path, sizeof outside.sun_path, "%s", path_of("before"));
  MUST(bind(before, (void *)&outside, sizeof outside) == 0 && listen(before, 3) == 0);
  if (chroot(path_of("root")))
    SKIP("not permitted to change the root");
  MUST(chdir("/inside") == 0);
  int door = socket(AF_UNIX, SOCK_STREAM, 0);
  struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/door"}, told = {0};
  MUST(bind(door, (void *)&address, sizeof address) == 0 && listen(door, 3) == 0);
  int letters = socket(AF_UNIX, SOCK_DGRAM, 0), sender = socket(AF_UNIX, SOCK_DGRAM, 0);
  struct sockaddr_un box = {.sun_family = AF_UNIX, .sun_path = "/box"};
  MUST(bind(letters, (void *)&box, sizeof box) == 0 && connect(sender, (void *)&box, sizeof box) == 0);
  ready();
  while (faccessat(out, "go", F_OK, 0))
    nap(0.002);
  char here[4096];
  CHECK(getcwd(here, sizeof here) && !strcmp(here, "/inside"));
  CHECK(access("/inside", F_OK) == 0);
  CHECK(access("/proc", F_OK) != 0);
  CHECK(access("/../inside", F_OK) == 0);
  socklen_t length = sizeof told;
  EQUAL(getsockname(door, (void *)&told, &length), 0);
  CHECK(!strcmp(told.sun_path, "/door"));
  EQUAL(connect(socket(AF_UNIX, SOCK_STREAM, 0), (void *)&address, sizeof address), 0);
  CHECK(accept(door, 0, 0) >= 0);
  length = sizeof told;
  EQUAL(getsockname(before, (void *)&told, &length), 0);
  CHECK(!strcmp(told.sun_path, outside.sun_path));
  EQUAL(faccessat(out, "before", F_OK, 0), 0);
  char letter = 0;
  EQUAL(send(sender, "l", 1, 0), 1);
  EQUAL(recv(letters, &letter, 1, MSG_DONTWAIT), 1);
  EQUAL(letter, 'l');
}

// --- credentials

static void check_ids(uid_t want_u[3], gid_t want_g[3]) {
  uid_t u[3];
  gid_t g[3];
  getresuid(&u[0], &u[1], &u[2]);
  getresgid(&g[0], &g[1], &g[2]);
  for (int i = 0; i < 3; i++) {
    EQUAL(u[i], want_u[i]);
    EQUAL(g[i], want_g[i]);
  }
}

static void nobody(void) { // a service that gave up its rights for good
  if (getuid())
    SKIP("not root");
  MUST(chmod(directory, 0777) == 0);
  gid_t groups[] = {65534, 7, 12345};
  MUST(setgroups(3, groups) == 0 && setgid(65534) == 0 && setuid(65534) == 0);
  cut();
  check_ids((uid_t[]){65534, 65534, 65534}, (gid_t[]){65534, 65534, 65534});
  gid_t seen[10];
  EQUAL(getgroups(10, seen), 3);
  int found = 0;
  for (int i = 0; i < 3; i++)
    found += seen[i] == 7 || seen[i] == 12345 || seen[i] == 65534;
  EQUAL(found, 3);
  EQUAL(setuid(0), -1);
  int fd = open(path_of("by nobody"), O_CREAT | O_WRONLY, 0600);
  struct stat s;
  CHECK(fd >= 0 && fstat(fd, &s) == 0);
  EQUAL(s.st_uid, 65534);
  CHECK(open("/etc/shadow", O_RDONLY) < 0);
}

static void mixed_ids(void) { // real, effective, saved, and the file system's own
  if (getuid())
    SKIP("not root");
  MUST(chmod(directory, 0777) == 0);
  MUST(setresgid(10, 20, 30) == 0 && setresuid(0, 1000, 2000) == 0);
  MUST(syscall(SYS_setfsuid, 0) == 1000);
  cut();
  check_ids((uid_t[]){0, 1000, 2000}, (gid_t[]){10, 20, 30});
  EQUAL(syscall(SYS_setfsuid, -1), 0);
  EQUAL(setresuid(-1, 0, -1), 0);
}

struct caps {
  uint32_t effective[2], permitted[2], inheritable[2];
};

static void get_caps(struct caps *c) {
  struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  struct __user_cap_data_struct data[2] = {0};
  MUST(syscall(SYS_capget, &header, data) == 0);
  for (int i = 0; i < 2; i++)
    c->effective[i] = data[i].effective, c->permitted[i] = data[i].permitted, c->inheritable[i] = data[i].inheritable;
}

static void capabilities(void) {
  if (getuid())
    SKIP("not root");
  MUST(chmod(directory, 0777) == 0);
  MUST(prctl(PR_CAPBSET_DROP, CAP_SYS_MODULE) == 0 && prctl(PR_CAPBSET_DROP, CAP_NET_RAW) == 0);
  MUST(prctl(PR_SET_SECUREBITS, SECBIT_KEEP_CAPS | SECBIT_NO_SETUID_FIXUP | SECBIT_NOROOT_LOCKED) == 0);
  MUST(setresuid(1000, 1000, 1000) == 0);
  struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  struct __user_cap_data_struct data[2] = {0};
  data[0].permitted = 1u << CAP_NET_BIND_SERVICE | 1u << CAP_CHOWN | 1u << CAP_KILL;
  data[0].effective = 1u << CAP_CHOWN;
  data[0].inheritable = 1u << CAP_NET_BIND_SERVICE;
  MUST(syscall(SYS_capset, &header, data) == 0);
  MUST(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_BIND_SERVICE, 0, 0) == 0);
  struct caps before, after;
  get_caps(&before);
  int bounding = 0, bounding_after = 0, bits = prctl(PR_GET_SECUREBITS);
  for (int c = 0; c < 41; c++)
    bounding += (c + 1) * prctl(PR_CAPBSET_READ, c);
  cut();
  get_caps(&after);
  CHECK(!memcmp(&before, &after, sizeof before));
  for (int c = 0; c < 41; c++)
    bounding_after += (c + 1) * prctl(PR_CAPBSET_READ, c);
  EQUAL(bounding_after, bounding);
  EQUAL(prctl(PR_GET_SECUREBITS), bits);
  EQUAL(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_NET_BIND_SERVICE, 0, 0), 1);
  EQUAL(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_CHOWN, 0, 0), 0);
  check_ids((uid_t[]){1000, 1000, 1000}, (gid_t[]){0, 0, 0});
}

static void *drop_alone(void *result) { // credentials belong to threads
  MUST(syscall(SYS_setresuid, 1234, 1234, 1234) == 0);
  *(volatile int *)result = 1;
  while (!stop)
    nap(0.002);
  EQUAL(syscall(SYS_geteuid), 1234);
  return 0;
}

static void credentials_per_thread(void) {
  if (getuid())
    SKIP("not root");
  int there = 0;
  pthread_t t = spawn(drop_alone, &there);
  while (!*(volatile int *)&there)
    nap(0.001);
  cut();
  EQUAL(syscall(SYS_geteuid), 0);
  stop = 1;
  pthread_join(t, 0);
}

// --- restrictions

static void no_new_privileges(void) {
  MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  cut();
  EQUAL(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
}

#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define REFUSE(nr, error)                                                                                              \
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error)
#define PERMIT(nr) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 1), ALLOW
#define NUMBER BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))

static int install(struct sock_filter *program, size_t length, int flags) {
  struct sock_fprog p = {length, program};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &p);
}

static void seccomp_filters(void) { // two filters, one for all threads, prctl stays allowed
  struct sock_filter first[] = {NUMBER, REFUSE(SYS_mkdir, EXDEV), ALLOW};
  struct sock_filter second[] = {NUMBER, REFUSE(SYS_rmdir, EDOM), REFUSE(SYS_link, ERANGE), ALLOW};
  MUST(install(first, COUNT(first), 0) == 0);
  MUST(install(second, COUNT(second), SECCOMP_FILTER_FLAG_LOG) == 0);
  cut();
  EQUAL(prctl(PR_GET_SECCOMP), 2);
  EQUAL(syscall(SYS_mkdir, path_of("x"), 0700), -1);
  EQUAL(errno, EXDEV);
  EQUAL(rmdir(path_of("y")), -1);
  EQUAL(errno, EDOM);
  EQUAL(link("/x", "/y"), -1);
  EQUAL(errno, ERANGE);
  struct sock_filter third[] = {NUMBER, REFUSE(SYS_symlink, EXDEV), ALLOW};
  EQUAL(install(third, COUNT(third), 0), 0);
}

static void seccomp_tight(void) { // nothing allowed but read, write and the end; everything else kills
  int go = open(path_of("go.file"), O_RDONLY | O_CREAT, 0600);
  MUST(go >= 0);
  struct sock_filter program[] = {NUMBER,
                                  PERMIT(SYS_read),
                                  PERMIT(SYS_write),
                                  PERMIT(SYS_exit_group),
                                  PERMIT(SYS_rt_sigreturn),
                                  PERMIT(SYS_restart_syscall),
                                  PERMIT(SYS_clock_nanosleep),
                                  PERMIT(SYS_nanosleep),
                                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)};
  char *data = map_anon(64 * PAGE);
  fill(data, 64 * PAGE, 1);
  MUST(install(program, COUNT(program), 0) == 0);
  ready();
  char c = 0;
  while (read(go, &c, 1) == 0)
    nap(0.002);
  EQUAL(c, 'g');
  CHECK(filled(data, 64 * PAGE, 1));
}

static void seccomp_no_mappings(void) { // it would be killed for a mapping that it makes, or takes away
  struct sock_filter program[] = {NUMBER, BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_munmap, 1, 0),
                                  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 1),
                                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS), ALLOW};
  char *data = map_anon(64 * PAGE);
  fill(data, 64 * PAGE, 1);
  MUST(install(program, COUNT(program), 0) == 0);
  cut();
  CHECK(filled(data, 64 * PAGE, 1));
}

static void seccomp_strict(void) {
  int go = open(path_of("go.file"), O_RDONLY | O_CREAT, 0600);
  MUST(go >= 0);
  MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
  ready();
  char c = 0;
  while (read(go, &c, 1) == 0)
    ;
  if (c == 'g')
    say("ok");
  syscall(SYS_exit, c == 'g' ? 0 : 1);
}

static void *filtered_thread(void *there) {
  struct sock_filter first[] = {NUMBER, REFUSE(SYS_mkdir, EXDEV), ALLOW};
  MUST(install(first, COUNT(first), 0) == 0);
  *(volatile int *)there = 1;
  while (!stop)
    nap(0.002);
  EQUAL(syscall(SYS_mkdir, path_of("x"), 0700), -1);
  EQUAL(errno, EXDEV);
  return 0;
}

static void seccomp_per_thread(void) {
  int there = 0;
  pthread_t t = spawn(filtered_thread, &there);
  while (!*(volatile int *)&there)
    nap(0.001);
  cut();
  EQUAL(syscall(SYS_mkdir, path_of("mine"), 0700), 0);
  stop = 1;
  pthread_join(t, 0);
}

// --- limits and odds

static void limits(void) {
  struct rlimit before[16], after;
  struct rlimit r = {200, 1000};
  MUST(setrlimit(RLIMIT_NOFILE, &r) == 0);
  r = (struct rlimit){12345678, 23456789};
  MUST(setrlimit(RLIMIT_FSIZE, &r) == 0);
  r = (struct rlimit){0, RLIM_INFINITY};
  setrlimit(RLIMIT_CORE, &r);
  r = (struct rlimit){1000, 2000};
  MUST(setrlimit(RLIMIT_SIGPENDING, &r) == 0);
  r = (struct rlimit){6 << 20, 6 << 20};
  MUST(setrlimit(RLIMIT_STACK, &r) == 0);
  for (int i = 0; i < 16; i++)
    getrlimit(i, &before[i]);
  cut();
  for (int i = 0; i < 16; i++) {
    getrlimit(i, &after);
    EQUAL(after.rlim_cur, before[i].rlim_cur);
    EQUAL(after.rlim_max, before[i].rlim_max);
  }
}

static void short_of_memory(void) { // no more may be had than there is
  struct rlimit none = {0, 0}, after;
  char line[200] = "";
  FILE *f = fopen("/proc/self/status", "r");
  while (fgets(line, sizeof line, f) && strncmp(line, "VmSize:", 7)) {
  }
  fclose(f);
  struct rlimit all = {strtoul(line + 7, 0, 10) << 10, strtoul(line + 7, 0, 10) << 10};
  MUST(all.rlim_cur > 0 && setrlimit(RLIMIT_AS, &all) == 0 && setrlimit(RLIMIT_DATA, &none) == 0);
  cut();
  EQUAL(getrlimit(RLIMIT_AS, &after), 0);
  EQUAL(after.rlim_cur, all.rlim_cur);
  EQUAL(after.rlim_max, all.rlim_max);
  EQUAL(getrlimit(RLIMIT_DATA, &after), 0);
  EQUAL(after.rlim_cur, 0);
  EQUAL(after.rlim_max, 0);
  CHECK(mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
}

static void write_to(const char *path, const char *text) {
  int fd = open(path, O_WRONLY);
  if (fd < 0 || write(fd, text, strlen(text)) < 0)
    say("note: %s: %s", path, strerror(errno));
  close(fd);
}

static void odds(void) {
  static const char *files[] = {"/proc/self/oom_score_adj", "/proc/self/coredump_filter", "/proc/self/timerslack_ns",
                                "/proc/self/cgroup", "/proc/self/loginuid"};
  write_to(files[0], "345");
  write_to(files[1], "0x15");
  prctl(PR_SET_TIMERSLACK, 123456);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  prctl(PR_SET_PDEATHSIG, SIGURG);
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  prctl(PR_SET_TSC, PR_TSC_ENABLE);
  prctl(57 /* PR_SET_IO_FLUSHER */, 1, 0, 0, 0);
  MUST(personality(ADDR_NO_RANDOMIZE | UNAME26) >= 0);
  syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 6);
  setpriority(PRIO_PROCESS, 0, 4);
  MUST(prctl(PR_SET_DUMPABLE, 0) == 0);
  char *before[5];
  for (int i = 0; i < 5; i++)
    before[i] = contents(files[i], 0);
  int flusher = prctl(58, 0, 0, 0, 0), person = personality(0xffffffff), priority = syscall(SYS_ioprio_get, 1, 0);
  cut();
  for (int i = 0; i < 5; i++)
    if (strcmp(before[i], contents(files[i], 0))) {
      say("%s is %s, expected %s", files[i], contents(files[i], 0), before[i]);
      CHECK(!"file of procfs the same");
    }
  int value = 0;
  EQUAL(prctl(PR_GET_TIMERSLACK), 123456);
  EQUAL(prctl(PR_GET_CHILD_SUBREAPER, &value), 0);
  EQUAL(value, 1);
  EQUAL(prctl(PR_GET_PDEATHSIG, &value), 0);
  EQUAL(value, SIGURG);
  EQUAL(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1);
  EQUAL(prctl(58, 0, 0, 0, 0), flusher);
  EQUAL(personality(0xffffffff), person);
  EQUAL(syscall(SYS_ioprio_get, 1, 0), priority);
  EQUAL(getpriority(PRIO_PROCESS, 0), 4);
  EQUAL(prctl(PR_GET_DUMPABLE), 0);
}

// All that prctl(2) tells, of the main thread and of another one, and all that procfs tells but for what passes.
#define GETTERS 200
static const struct { int option, what, is_pointer; } getters[] = {
    {2, 0, 1}, {3}, {5, 0, 1}, {7}, {9, 0, 1}, {11, 0, 1}, {13}, {19, 0, 1}, {21}, {25, 0, 1}, {27}, {30}, {34}, {37, 0, 1}, {39},
    {42}, {46}, {51}, {52, 0}, {52, 1}, {52, 2}, {56}, {58}, {64}, {66}, {68}, {70}, {72}, {74}};

static int fetch(int *all) {
  int n = 0;
  for (size_t i = 0; i < sizeof getters / sizeof *getters; i++) {
    int value = 0;
    int r = getters[i].is_pointer ? prctl(getters[i].option, &value, 0, 0, 0) : prctl(getters[i].option, getters[i].what, 0, 0, 0);
    all[n++] = r < 0 ? -errno : r;
    all[n++] = value;
  }
  for (int capability = 0; capability < 41; capability++)
    all[n++] = prctl(PR_CAPBSET_READ, capability, 0, 0, 0) << 1 | prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, capability, 0, 0);
  return n;
}

static void compare_all(const int *then, const char *who) {
  int now[GETTERS];
  for (int n = fetch(now), i = 0; i < n; i++)
    if (now[i] != then[i]) {
      say("%s: getter %d (option %d): %d, expected %d", who, i, i / 2 < 29 ? getters[i / 2].option : 0, now[i], then[i]);
      CHECK(!"what prctl tells the same");
    }
}

static void choose(int early) {
  MUST(!prctl(33 /* PR_MCE_KILL */, 1, early, 0, 0));
  prctl(57 /* PR_SET_IO_FLUSHER */, early, 0, 0, 0);
  prctl(53 /* PR_SET_SPECULATION_CTRL */, early, 4 /* PR_SPEC_DISABLE */, 0, 0);
  prctl(PR_SET_TIMERSLACK, 77777 + early);
}

static atomic_int other_is_ready, may_compare;
static void *other_chooses(void *nothing) {
  int then[GETTERS];
  choose(0);
  MUST(personality(ADDR_NO_RANDOMIZE | STICKY_TIMEOUTS) >= 0); // each thread has its own
  fetch(then);
  other_is_ready = 1;
  while (!may_compare)
    usleep(1000);
  compare_all(then, "the other thread");
  EQUAL(personality(0xffffffff), ADDR_NO_RANDOMIZE | STICKY_TIMEOUTS);
  return nothing;
}

// Lines of a file of procfs, but for those that begin with a word of what passes.
static char *lasting(const char *path) {
  static const char *passing[] = {"PPid:", "TracerPid:", "Vm", "Rss", "SigQ:", "FDSize:", "HugetlbPages:", "voluntary", "nonvoluntary", "State:"};
  char *all = contents(path, 0), *kept = calloc(1, strlen(all) + 2), *rest = all;
  for (char *line; (line = strsep(&rest, "\n"));) {
    int passes = 0;
    for (size_t i = 0; i < sizeof passing / sizeof *passing; i++)
      passes |= !strncmp(line, passing[i], strlen(passing[i]));
    if (!passes)
      strcat(strcat(kept, line), "\n");
  }
  free(all);
  return kept;
}

static void all_that_is_told(void) {
  static const char *files[] = {"status", "limits", "loginuid", "oom_score_adj", "coredump_filter", "timerslack_ns", "personality", "comm",
                                "cgroup", "attr/current", "uid_map", "gid_map", "setgroups"}; // clocks go on by a namespace
  char *before[sizeof files / sizeof *files], path[64];
  int then[GETTERS];
  write_to("/proc/self/loginuid", "4321");
  choose(1);
  pthread_t other;
  MUST(!pthread_create(&other, 0, other_chooses, 0));
  while (!other_is_ready)
    usleep(1000);
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    snprintf(path, sizeof path, "/proc/self/%s", files[i]);
    before[i] = access(path, R_OK) ? 0 : lasting(path);
  }
  fetch(then);
  cut();
  compare_all(then, "the main thread");
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    snprintf(path, sizeof path, "/proc/self/%s", files[i]);
    char *now = before[i] ? lasting(path) : 0;
    if (now && strcmp(now, before[i])) {
      say("%s is %s, expected %s", path, now, before[i]);
      CHECK(!"file of procfs the same");
    }
  }
  may_compare = 1;
  pthread_join(other, 0);
}

static void read_only_program(void) { // PR_SET_MDWE: memory never becomes executable that was written
  if (prctl(65, 1, 0, 0, 0))
    SKIP("this kernel has no PR_SET_MDWE");
  cut();
  EQUAL(prctl(66, 0, 0, 0, 0), 1);
  CHECK(mmap(0, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
}

SCENARIOS({"identity", identity}, {"renamed", renamed}, {"clocks", clocks}, {"directories", directories},
          {"changed_root", changed_root}, {"nobody", nobody}, {"mixed_ids", mixed_ids},
          {"capabilities", capabilities}, {"credentials_per_thread", credentials_per_thread},
          {"no_new_privileges", no_new_privileges}, {"seccomp_filters", seccomp_filters},
          {"seccomp_tight", seccomp_tight}, {"seccomp_no_mappings", seccomp_no_mappings}, {"seccomp_strict", seccomp_strict},
          {"seccomp_per_thread", seccomp_per_thread}, {"limits", limits}, {"short_of_memory", short_of_memory}, {"odds", odds}, {"all_that_is_told", all_that_is_told},
          {"read_only_program", read_only_program})
