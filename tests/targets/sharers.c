// Processes that share memory without being threads: clone(2) with CLONE_VM and without CLONE_THREAD.
//
// They have one C library for all of them, and one thread pointer. So they make system calls and touch memory, and leave its
// locks and buffers alone.
#include "target.h"
#include <linux/kcmp.h>
#include <sys/prctl.h>

#define STACK (256 << 10)

static volatile int arrived, turn, ended_turn;

static void arrive(void) {
  __atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST);
}

static void await_arrivals(int n) {
  while (__atomic_load_n(&arrived, __ATOMIC_SEQ_CST) < n)
    nap(0.0005);
}

static void await_turn(int n) {
  while (__atomic_load_n(&turn, __ATOMIC_SEQ_CST) < n)
    nap(0.0005);
}

// Lets somebody do what it is to do in this turn, and waits for the end of that.
static void let(int n) {
  __atomic_store_n(&turn, n, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&ended_turn, __ATOMIC_SEQ_CST) < n)
    nap(0.0005);
}

static void end_turn(int n) {
  __atomic_store_n(&ended_turn, n, __ATOMIC_SEQ_CST);
}

// A process in the same memory.
static pid_t sharer(int flags, int (*run)(void *), long argument) {
  char *stack = mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  MUST(stack != MAP_FAILED);
  pid_t pid = clone(run, stack + STACK, CLONE_VM | flags, (void *)argument);
  MUST(pid > 0);
  return pid;
}

static void await(pid_t pid, int expected) {
  int status = -1;
  pid_t got;
  while ((got = waitpid(pid, &status, __WALL)) < 0 && errno == EINTR)
    ;
  EQUAL(got, pid);
  EQUAL(status, expected);
}

static int shares(pid_t one, pid_t other, int what) {
  long found = syscall(SYS_kcmp, one, other, what, 0, 0);
  CHECK(found >= 0);
  return found == 0;
}

static uint64_t words[4096];

// --- a parent and a child

static char *mapped;

static int one_child(void *parent) {
  pid_t pid = getpid();
  fill(words, sizeof words / 2, 5);
  MUST(!chdir("/usr"));
  arrive();
  await_turn(1);
  EQUAL(getpid(), pid);
  EQUAL(getppid(), (long)parent);
  CHECK(filled(words, sizeof words / 2, 5));
  CHECK(filled(words + 2048, sizeof words / 2, 6));
  fill(words, sizeof words, 9);
  mapped = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  MUST(mapped != MAP_FAILED);
  mapped[3 * PAGE] = 33;
  EQUAL(open("/dev/null", O_RDONLY) >= 0, 1);
  char here[64];
  CHECK(syscall(SYS_getcwd, here, sizeof here) > 0 && !strcmp(here, "/usr"));
  end_turn(1);
  await_turn(2);
  return failures ? 1 : 7;
}

static void pair(void) {
  MUST(!chdir("/"));
  fill(words + 2048, sizeof words / 2, 6);
  pid_t pid = sharer(SIGCHLD, one_child, getpid());
  await_arrivals(1);
  int next = dup(0);
  close(next);
  cut();
  CHECK(shares(getpid(), pid, KCMP_VM));
  CHECK(!shares(getpid(), pid, KCMP_FILES));
  CHECK(!shares(getpid(), pid, KCMP_FS));
  CHECK(!shares(getpid(), pid, KCMP_SIGHAND));
  let(1);
  CHECK(filled(words, sizeof words, 9));
  EQUAL(mapped[3 * PAGE], 33);
  EQUAL(fcntl(next, F_GETFD), -1);
  void *end = sbrk(0);
  EQUAL(brk((char *)end + PAGE), 0);
  *(char *)end = 1;
  char here[64];
  CHECK(syscall(SYS_getcwd, here, sizeof here) > 0 && !strcmp(here, "/"));
  turn = 2;
  await(pid, 7 << 8);
}

// --- a line of descendants, and processes beside them with memory of their own

static int descend(void *depth) {
  long left = (long)depth;
  pid_t pid = left ? sharer(SIGCHLD, descend, left - 1) : 0;
  pid_t own = left == 2 ? fork() : 0;
  if (left == 2 && !own) {
    arrived = -100; // in its own memory
    wait_go();
    _exit(arrived == -100 ? 0 : 1);
  }
  uint64_t *mine = words + 1024 * left;
  fill(mine, 8192, left);
  arrive();
  wait_go();
  await_turn(4 - left); // its parent has looked
  CHECK(filled(mine, 8192, left));
  if (pid) {
    CHECK(shares(getpid(), pid, KCMP_VM));
    turn = 5 - left;
    await(pid, 0);
  }
  if (own)
    await(own, 0);
  return 0;
}

static void generations(void) {
  pid_t pid = sharer(SIGCHLD, descend, 3);
  await_arrivals(4);
  cut();
  CHECK(shares(getpid(), pid, KCMP_VM));
  turn = 1;
  await(pid, 0);
  EQUAL(arrived, 4);
  EQUAL(turn, 4);
}

// --- children of one that has become another program, or has ended

static int hold[2];

static int brother(void *n) {
  arrive();
  wait_go();
  await_turn((long)n);
  words[(long)n] = getpid();
  end_turn((long)n);
  await_turn(100);
  return 0;
}

// In memory of its own, of which it has made two others part. What they find is told by the ends of a pipe.
static int tell[2];

static int asks_brothers(void *pids) {
  pid_t *who = pids;
  arrive();
  wait_go();
  CHECK(shares(who[0], who[1], KCMP_VM));
  CHECK(shares(getpid(), who[0], KCMP_VM));
  CHECK(!shares(getpid(), getppid(), KCMP_VM));
  for (int n = 1; n <= 2; n++) {
    let(n);
    EQUAL(words[n], who[n - 1]);
  }
  turn = 100;
  MUST(write(tell[1], failures ? "n" : "y", 1) == 1);
  return 0;
}

static pid_t brothers_pids[2];

static void make_brothers(void) {
  for (long n = 1; n <= 2; n++)
    brothers_pids[n - 1] = sharer(SIGCHLD, brother, n);
  sharer(SIGCHLD, asks_brothers, (long)brothers_pids);
  await_arrivals(3);
}

// Says that the others are there.
static void expect_word(char expected) {
  char word = 0;
  EQUAL(read(tell[0], &word, 1), 1);
  EQUAL(word, expected);
}

static void brothers(void) {
  MUST(!pipe(hold) && !pipe(tell));
  pid_t pid = fork();
  MUST(pid >= 0);
  if (!pid) {
    make_brothers();
    MUST(dup2(hold[0], 0) == 0);
    close(hold[0]);
    close(hold[1]);
    MUST(write(tell[1], "r", 1) == 1);
    execlp("cat", "cat", (char *)0);
    _exit(3);
  }
  close(hold[0]);
  expect_word('r');
  // It has become another program when it has read something.
  char path[64], name[16] = "";
  snprintf(path, sizeof path, "/proc/%d/comm", pid);
  while (strcmp(name, "cat\n")) {
    int fd = open(path, O_RDONLY);
    ssize_t n = fd < 0 ? 0 : read(fd, name, sizeof name - 1);
    name[n > 0 ? n : 0] = 0;
    close(fd);
    nap(0.001);
  }
  cut();
  expect_word('y');
  close(hold[1]);
  await(pid, 0);
}

static void orphans(void) {
  MUST(!pipe(tell));
  MUST(!prctl(PR_SET_CHILD_SUBREAPER, 1));
  pid_t pid = fork();
  MUST(pid >= 0);
  if (!pid) {
    make_brothers();
    syscall(SYS_exit_group, 0);
  }
  await(pid, 0);
  cut();
  expect_word('y');
  for (int n = 0; n < 3; n++)
    CHECK(wait(0) > 0);
}

// --- made for somebody else

static int late_brother(void *unused) {
  (void)unused;
  arrive();
  wait_go();
  EQUAL(getppid(), words[0]);
  words[1] = getpid();
  end_turn(1);
  await_turn(2);
  return 0;
}

static int makes_brother(void *unused) {
  (void)unused;
  words[2] = sharer(CLONE_PARENT, late_brother, 0);
  arrive();
  wait_go();
  await_turn(2);
  return 0;
}

static void adopted(void) {
  words[0] = getpid();
  pid_t pid = sharer(SIGCHLD, makes_brother, 0);
  await_arrivals(2);
  cut();
  let(1);
  EQUAL(words[1], words[2]);
  CHECK(shares(pid, words[2], KCMP_VM));
  turn = 2;
  await(words[2], 0);
  await(pid, 0);
}

// --- signal actions

static int heard[65];

static void hear(int signal) {
  __atomic_add_fetch(&heard[signal], 1, __ATOMIC_SEQ_CST);
}

static void hear_more(int signal) {
  __atomic_add_fetch(&heard[signal], 100, __ATOMIC_SEQ_CST);
}

static int changes_action(void *unused) {
  (void)unused;
  arrive();
  wait_go();
  await_turn(1);
  signal(SIGUSR1, hear_more);
  kill(getpid(), SIGUSR1);
  end_turn(1);
  await_turn(2);
  return 0;
}

static int has_own_actions(void *unused) {
  (void)unused;
  signal(SIGUSR2, SIG_IGN);
  arrive();
  wait_go();
  await_turn(2);
  kill(getpid(), SIGUSR2);
  kill(getpid(), SIGUSR1);
  return 0;
}

static void actions(void) {
  signal(SIGUSR1, hear);
  signal(SIGUSR2, hear);
  pid_t same = sharer(CLONE_SIGHAND | SIGCHLD, changes_action, 0), own = sharer(SIGCHLD, has_own_actions, 0);
  await_arrivals(2);
  cut();
  CHECK(shares(getpid(), same, KCMP_SIGHAND));
  CHECK(!shares(getpid(), own, KCMP_SIGHAND));
  let(1);
  EQUAL(heard[SIGUSR1], 100);
  kill(getpid(), SIGUSR1);
  EQUAL(heard[SIGUSR1], 200);
  turn = 2;
  await(same, 0);
  await(own, 0);
  EQUAL(heard[SIGUSR1], 201);
  EQUAL(heard[SIGUSR2], 0);
}

// --- threads as they were before there were any: processes that share everything, and tell their ends by another signal

static int shared_pipe[2];

static int old_thread(void *n) {
  fill(words + 512 * (long)n, 4096, (long)n);
  arrive();
  wait_go();
  await_turn((long)n);
  CHECK(filled(words + 512 * (long)n, 4096, (long)n));
  char c = (char)(long)n;
  EQUAL(write(shared_pipe[1], &c, 1), 1);
  EQUAL(syscall(SYS_dup2, shared_pipe[0], 100 + (long)n), 100 + (long)n);
  char path[] = "/tmp";
  if ((long)n == 3)
    EQUAL(syscall(SYS_chdir, path), 0);
  end_turn((long)n);
  return (long)n;
}

static void old_threads(void) {
  MUST(!pipe(shared_pipe) && !chdir("/usr"));
  int flags = CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_SYSVSEM | CLONE_IO, end = SIGRTMIN + 1;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, end);
  sigprocmask(SIG_BLOCK, &set, 0);
  pid_t pids[4];
  for (long n = 1; n <= 3; n++)
    pids[n] = sharer(flags | end, old_thread, n);
  await_arrivals(3);
  cut();
  for (int what = KCMP_VM; what <= KCMP_SIGHAND; what++)
    CHECK(shares(getpid(), pids[2], what));
  for (int n = 1; n <= 3; n++) {
    let(n);
    char c = 0;
    EQUAL(read(100 + n, &c, 1), 1);
    EQUAL(c, n);
    int got = 0;
    sigwait(&set, &got);
    EQUAL(got, end);
    await(pids[n], n << 8);
  }
  char here[64];
  CHECK(getcwd(here, sizeof here) && !strcmp(here, "/tmp"));
}

// --- threads in both

static int apart_thread(void *n) {
  pid_t tid = syscall(SYS_gettid);
  arrive();
  wait_go();
  EQUAL(syscall(SYS_gettid), tid);
  words[(long)n] = tid;
  __atomic_add_fetch(&ended_turn, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_exit, 0); // of this thread alone
  return 0;
}

static int has_threads(void *unused) {
  (void)unused;
  int flags = CLONE_THREAD | CLONE_SIGHAND | CLONE_FILES | CLONE_FS | CLONE_SYSVSEM;
  for (long n = 0; n < 20; n++)
    words[1000 + n] = sharer(flags, apart_thread, n);
  arrive();
  wait_go();
  while (__atomic_load_n(&ended_turn, __ATOMIC_SEQ_CST) < 20)
    nap(0.001);
  for (int n = 0; n < 20; n++)
    EQUAL(words[n], words[1000 + n]);
  return 0;
}

static void *waits(void *argument) {
  arrive();
  wait_go();
  return argument;
}

static void threaded(void) {
  pthread_t own[4];
  for (long n = 0; n < 4; n++)
    own[n] = spawn(waits, (void *)n);
  await_arrivals(4);
  pid_t pid = sharer(SIGCHLD, has_threads, 0);
  await_arrivals(25);
  cut();
  for (long n = 0; n < 4; n++) {
    void *result;
    pthread_join(own[n], &result);
    EQUAL(result, n);
  }
  await(pid, 0);
}

// --- on the main stack: what we put below it for a moment must be below all of them

static volatile uint64_t deepest;

static int on_main_stack(void *unused) {
  (void)unused;
  uint64_t own[64];
  fill(own, sizeof own, 77);
  deepest = (uint64_t)own;
  arrive();
  wait_go();
  CHECK(filled(own, sizeof own, 77));
  return 0;
}

static void one_stack(void) {
  // Both stacks lie in one mapping, the child's at its very end.
  char *maps = contents("/proc/self/maps", 0), *line = strstr(maps, "[stack]");
  MUST(line);
  while (line > maps && line[-1] != '\n')
    line--;
  char *end = (char *)strtoul(line, 0, 16) + (12 << 10);
  free(maps);
  MUST(end < (char *)__builtin_frame_address(0) - (64 << 10));
  pid_t pid = clone(on_main_stack, end, CLONE_VM | SIGCHLD, 0);
  MUST(pid > 0);
  await_arrivals(1);
  cut();
  await(pid, 0);
  CHECK(deepest < (uint64_t)end);
}

// --- both write all the time, each only after the other

#define PAGES 2048

static struct {
  uint64_t at;
  uint64_t rest[511];
} *pages;
static uint64_t steps;

// Each step is that of one of the two, and writes a page with its number.
static void step(uint64_t who) {
  uint64_t now = __atomic_load_n(&steps, __ATOMIC_SEQ_CST);
  if (now % 2 != who) {
    nap(0.00005);
    return;
  }
  // The page was written last a whole round ago.
  uint64_t before = now < PAGES ? 0 : now - PAGES;
  CHECK(pages[now % PAGES].at == before);
  pages[now % PAGES].at = now;
  __atomic_store_n(&steps, now + 1, __ATOMIC_SEQ_CST);
}

static int steps_too(void *unused) {
  (void)unused;
  arrive();
  while (!gone())
    for (int i = 0; i < 50; i++)
      step(1);
  return 0;
}

static void turns(void) {
  pages = (void *)map_anon(PAGES * PAGE);
  memset(pages, 0, PAGES * PAGE);
  pid_t pid = sharer(SIGCHLD, steps_too, 0);
  await_arrivals(1);
  ready();
  while (!gone())
    for (int i = 0; i < 50; i++)
      step(0);
  await(pid, 0);
  CHECK(steps > 0);
}

// --- much memory, of many kinds, which the other one then changes

#define MUCH (48ul << 20)

static char *much, *kept, *both, *file;

static int changes_memory(void *unused) {
  (void)unused;
  arrive();
  await_turn(1);
  CHECK(filled(much, MUCH, 1));
  CHECK(filled(kept, 16 * PAGE, 2));
  CHECK(filled(both, 16 * PAGE, 3));
  CHECK(filled(file, 4 * PAGE, 4));
  MUST(!munmap(much + MUCH / 2, PAGE));
  fill(much, MUCH / 4, 11);
  MUST(!mprotect(kept, PAGE, PROT_READ));
  fill(both, 16 * PAGE, 13);
  end_turn(1);
  await_turn(2);
  return 0;
}

static void memory(void) {
  much = map_anon(MUCH);
  kept = map_anon(16 * PAGE);
  both = mmap(0, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int fd = open(path_of("mapped"), O_RDWR | O_CREAT, 0600);
  MUST(fd >= 0 && !ftruncate(fd, 4 * PAGE));
  file = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  MUST(both != MAP_FAILED && file != MAP_FAILED && !madvise(kept, 16 * PAGE, MADV_DONTFORK));
  fill(much, MUCH, 1);
  fill(kept, 16 * PAGE, 2);
  fill(both, 16 * PAGE, 3);
  fill(file, 4 * PAGE, 4);
  pid_t pid = sharer(SIGCHLD, changes_memory, 0);
  // Of this one all memory may come later.
  pid_t apart = fork();
  if (!apart) {
    wait_go();
    CHECK(filled(much, MUCH, 1));
    _exit(failures ? 1 : 0);
  }
  await_arrivals(1);
  cut();
  let(1);
  CHECK(filled(much, MUCH / 4, 11));
  CHECK(filled(much + MUCH / 4, MUCH / 4, 1 + MUCH / 4 / 8));
  CHECK(filled(both, 16 * PAGE, 13));
  unsigned char there;
  EQUAL(mincore(much + MUCH / 2, PAGE, &there), -1);
  turn = 2;
  await(pid, 0);
  await(apart, 0);
}

// --- they come and go, and become other programs

static int comes_and_goes(void *n) {
  for (long i = 0; i < (long)n % 7; i++)
    nap(0.001);
  if ((long)n % 3 == 0) {
    static char *const arguments[] = {"true", 0}, *const environment[] = {0};
    execve("/bin/true", arguments, environment);
  }
  return 0;
}

static void passing(void) {
  char *stacks = map_anon(4 * STACK);
  ready();
  for (long n = 0; !gone(); n++) {
    pid_t pids[4];
    for (int i = 0; i < 4; i++) {
      pids[i] = clone(comes_and_goes, stacks + (i + 1) * STACK, CLONE_VM | SIGCHLD, (void *)(n + i));
      MUST(pids[i] > 0);
    }
    for (int i = 0; i < 4; i++)
      await(pids[i], 0);
  }
}

// --- it becomes another program again and again, and leaves its memory to a child that writes all over it

static int scribbles(void *parent) {
  arrive();
  for (int i = 0; i < 1000 && shares((long)parent, getpid(), KCMP_VM); i++)
    nap(0.0005);
  for (int i = 0; i < 80; i++) {
    fill(words, sizeof words, 1000 + i);
    nap(0.002);
  }
  return 0;
}

static void replaced(void) {
  const char *before = getenv("ROUND");
  long round = before ? atol(before) : 0;
  fill(words, sizeof words, round);
  if (!round)
    ready();
  for (int i = 0; i < 60; i++) {
    nap(0.002);
    CHECK(filled(words, sizeof words, round));
  }
  while (waitpid(-1, 0, WNOHANG | __WALL) > 0)
    ;
  if (failures || gone()) {
    while (wait(0) > 0)
      ;
    return;
  }
  sharer(SIGCHLD, scribbles, getpid());
  await_arrivals(1);
  char next[32], *const arguments[] = {"sharers", "replaced", directory, 0}, *const environment[] = {next, 0};
  snprintf(next, sizeof next, "ROUND=%ld", round + 1);
  execve("/proc/self/exe", arguments, environment);
  MUST(0);
}

// --- what cannot be

// A grandchild shares the root's memory, and its parent has become another program.
static int makes_heir(void *unused) {
  (void)unused;
  sharer(SIGCHLD, brother, 1);
  await_arrivals(1);
  static char *const arguments[] = {"sleep", "1000", 0}, *const environment[] = {0};
  execve("/bin/sleep", arguments, environment);
  return 3;
}

static void skipped(void) {
  pid_t pid = sharer(SIGCHLD, makes_heir, 0);
  await_arrivals(1);
  while (shares(getpid(), pid, KCMP_VM))
    nap(0.001);
  cut();
  turn = 100;
  kill(pid, SIGKILL);
  await(pid, SIGKILL);
}

// One outside of the tree.
static int makes_stranger(void *unused) {
  (void)unused;
  sharer(SIGCHLD, brother, 1);
  return 0;
}

static void outside(void) {
  pid_t pid = sharer(SIGCHLD, makes_stranger, 0);
  await(pid, 0);
  await_arrivals(1);
  cut();
  turn = 100;
}

static int another_personality(void *unused) {
  (void)unused;
  syscall(SYS_personality, 0x40000);
  arrive();
  await_turn(1);
  return syscall(SYS_personality, 0xffffffff) != 0x40000;
}

static void personalities(void) {
  int own = syscall(SYS_personality, 0xffffffff);
  pid_t pid = sharer(SIGCHLD, another_personality, 0);
  await_arrivals(1);
  cut();
  EQUAL(syscall(SYS_personality, 0xffffffff), own);
  turn = 1;
  await(pid, 0);
}

static int until_turn(void *unused) {
  (void)unused;
  arrive();
  await_turn(1);
  return 0;
}

static void clocks(void) {
  const int new_time = 0x80; // CLONE_NEWTIME
  int home = open("/proc/self/ns/time", O_RDONLY | O_CLOEXEC);
  if (home < 0 || unshare(new_time))
    SKIP("not permitted to make time namespaces");
  pid_t pid = fork();
  MUST(pid >= 0);
  if (!pid) {
    pid_t same = sharer(SIGCHLD, until_turn, 0);
    await_arrivals(1);
    cut();
    turn = 1;
    await(same, 0);
    _exit(failures ? 1 : 0);
  }
  MUST(!setns(home, new_time) && !close(home));
  await(pid, 0);
}

SCENARIOS({"pair", pair}, {"generations", generations}, {"brothers", brothers}, {"orphans", orphans},
          {"adopted", adopted}, {"actions", actions}, {"old_threads", old_threads}, {"threaded", threaded},
          {"one_stack", one_stack}, {"turns", turns}, {"memory", memory}, {"passing", passing}, {"replaced", replaced},
          {"skipped", skipped}, {"outside", outside}, {"personalities", personalities}, {"clocks", clocks})
