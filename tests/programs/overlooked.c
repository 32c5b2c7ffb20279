// Whatever a program has set when a snapshot is taken, and set otherwise before and after it, is found again when it goes back there: of
// each kind of state one value at a first snapshot, another one at the second, and a third one when it goes back to both.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <stillpoint.h>

#define PAGE 4096L

static const char *at = "the beginning";

static void fail(const char *what) {
  fprintf(stderr, "%s: %s (%s)\n", at, what, strerror(errno));
  exit(1);
}

#define MUST(call)                                                                                                               \
  do {                                                                                                                           \
    if ((call) < 0)                                                                                                              \
      fail(#call);                                                                                                               \
  } while (0)

// Another thread does things to itself when it is asked to.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t asked = PTHREAD_COND_INITIALIZER, answered = PTHREAD_COND_INITIALIZER;
static long (*job)(long);
static long argument, result;
static pid_t worker_tid;

static _Noreturn void *worker(void *unused) {
  (void)unused;
  worker_tid = gettid();
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!job)
      pthread_cond_wait(&asked, &lock);
    result = job(argument);
    job = 0;
    pthread_cond_signal(&answered);
  }
}

static long there(long (*what)(long), long value) {
  pthread_mutex_lock(&lock);
  job = what, argument = value;
  pthread_cond_signal(&asked);
  while (job)
    pthread_cond_wait(&answered, &lock);
  long got = result;
  pthread_mutex_unlock(&lock);
  return got;
}

// What threads tell the kernel about themselves.
static long mask_to(long v) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGRTMIN + (int)v);
  return pthread_sigmask(SIG_SETMASK, &set, 0);
}
static long mask_of(long unused) {
  sigset_t set;
  (void)unused;
  pthread_sigmask(SIG_SETMASK, 0, &set);
  for (int v = 1; v <= 3; v++)
    if (sigismember(&set, SIGRTMIN + v))
      return v;
  return 0;
}
static char stacks[4][64 << 10];
static long stack_to(long v) {
  stack_t s = {.ss_sp = stacks[v], .ss_size = sizeof stacks[v]};
  return sigaltstack(&s, 0);
}
static long stack_of(long unused) {
  stack_t s;
  (void)unused;
  sigaltstack(0, &s);
  return ((char *)s.ss_sp - stacks[0]) / (long)sizeof stacks[0];
}
static long name_to(long v) {
  char name[16];
  snprintf(name, sizeof name, "name (%ld)\n", v);
  return prctl(PR_SET_NAME, name);
}
static long name_of(long unused) {
  char name[16] = "";
  (void)unused;
  prctl(PR_GET_NAME, name);
  return name[6] - '0';
}
static long slack_to(long v) { return prctl(PR_SET_TIMERSLACK, 60000 + v); }
static long slack_of(long unused) { return (void)unused, prctl(PR_GET_TIMERSLACK) - 60000; }
static struct {
  void *list;
  long offset;
  void *pending;
} heads[4];
static long robust_to(long v) {
  heads[v].list = &heads[v];
  return syscall(SYS_set_robust_list, &heads[v], sizeof heads[v]);
}
static long robust_of(long unused) {
  void *head;
  size_t len;
  (void)unused;
  syscall(SYS_get_robust_list, 0, &head, &len);
  return (char *)head - (char *)heads > 0 ? ((char *)head - (char *)heads) / (long)sizeof heads[0] : 0;
}

static void set_mask(int v) { MUST(there(mask_to, v)); }
static int get_mask(void) { return (int)there(mask_of, 0); }
static void set_stack(int v) { MUST(there(stack_to, v)); }
static int get_stack(void) { return (int)there(stack_of, 0); }
static void set_name(int v) { MUST(there(name_to, v)); }
static int get_name(void) { return (int)there(name_of, 0); }
static void set_slack(int v) { MUST(there(slack_to, v)); }
static int get_slack(void) { return (int)there(slack_of, 0); }
static void set_robust(int v) { MUST(there(robust_to, v)); }
static int get_robust(void) { return (int)there(robust_of, 0); }
static void set_nice(int v) { MUST(setpriority(PRIO_PROCESS, (id_t)worker_tid, v)); }
static int get_nice(void) { return getpriority(PRIO_PROCESS, (id_t)worker_tid); }
static void set_io(int v) { MUST(syscall(SYS_ioprio_set, 1, worker_tid, 2 << 13 | v)); }
static int get_io(void) { return (int)syscall(SYS_ioprio_get, 1, worker_tid) & 7; }
static void set_affinity(int v) {
  // Where there is one processor it is the same each time.
  unsigned long bits = (unsigned long)v;
  if (sysconf(_SC_NPROCESSORS_ONLN) > 1)
    MUST(syscall(SYS_sched_setaffinity, worker_tid, sizeof bits, &bits));
}
static int get_affinity(void) {
  unsigned long bits[16] = {0};
  MUST(syscall(SYS_sched_getaffinity, worker_tid, sizeof bits, bits));
  return (int)bits[0] & 3;
}
static int expect_affinity(int v) { return sysconf(_SC_NPROCESSORS_ONLN) > 1 ? v : get_affinity(); }

// A thread that ends, and another one with its id.
static pthread_t passing;
static int passing_is_there, leave;
static pid_t passing_tid;
static pthread_cond_t left = PTHREAD_COND_INITIALIZER;
static void *pass(void *name) {
  prctl(PR_SET_NAME, name);
  pthread_mutex_lock(&lock);
  passing_tid = gettid();
  pthread_cond_broadcast(&left);
  while (!leave)
    pthread_cond_wait(&left, &lock);
  pthread_mutex_unlock(&lock);
  return 0;
}
static void end_passing(void) {
  if (!passing_is_there)
    return;
  pthread_mutex_lock(&lock);
  leave = 1;
  pthread_cond_broadcast(&left);
  pthread_mutex_unlock(&lock);
  pthread_join(passing, 0);
  passing_is_there = leave = 0;
}
static void set_passing(int v) {
  static char *names[] = {"", "1", "2", "3"};
  end_passing();
  if (v == 3)
    return;
  int last = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
  if (passing_tid && last >= 0)
    dprintf(last, "%d", passing_tid - 1);
  close(last);
  pthread_mutex_lock(&lock);
  passing_tid = 0;
  if (pthread_create(&passing, 0, pass, names[v]))
    fail("pthread_create");
  while (!passing_tid)
    pthread_cond_wait(&left, &lock);
  pthread_mutex_unlock(&lock);
  passing_is_there = 1;
}
static int get_passing(void) {
  char path[64], name[16] = "";
  if (!passing_is_there)
    return 3;
  snprintf(path, sizeof path, "/proc/self/task/%d/comm", passing_tid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0 || read(file, name, sizeof name) < 1)
    return -1;
  close(file);
  return name[0] - '0';
}

// The process as a whole.
static void first_handler(int s) { (void)s; }
static void second_handler(int s) { (void)s; }
static void third_handler(int s) { (void)s; }
static void (*handlers[])(int) = {SIG_DFL, first_handler, second_handler, third_handler};
static long handler_to(long v) {
  struct sigaction action = {.sa_handler = handlers[v]};
  return sigaction(SIGUSR2, &action, 0);
}
static void set_handler(int v) { MUST(there(handler_to, v)); }
static int get_handler(void) {
  struct sigaction action;
  MUST(sigaction(SIGUSR2, 0, &action));
  for (int v = 1; v <= 3; v++)
    if (action.sa_handler == handlers[v])
      return v;
  return 0;
}
static void set_directory(int v) {
  char path[64];
  snprintf(path, sizeof path, "%s%d", v == 0 ? "." : "/proc/self/fd/", v == 0 ? 0 : 200 + v);
  MUST(chdir(path));
}
static int get_directory(void) {
  char path[4096] = "";
  if (!getcwd(path, sizeof path))
    fail("getcwd");
  return path[strlen(path) - 1] - '0';
}
static void set_umask(int v) { umask((mode_t)v); }
static int get_umask(void) {
  int v = (int)umask(0);
  umask((mode_t)v);
  return v;
}
static void set_limit(int v) {
  struct rlimit limit;
  MUST(getrlimit(RLIMIT_CORE, &limit));
  limit.rlim_cur = (rlim_t)v * 4096;
  if (limit.rlim_max != RLIM_INFINITY && limit.rlim_cur > limit.rlim_max)
    limit.rlim_cur = 0;
  MUST(setrlimit(RLIMIT_CORE, &limit));
}
static int get_limit(void) {
  struct rlimit limit;
  MUST(getrlimit(RLIMIT_CORE, &limit));
  return (int)(limit.rlim_cur / 4096);
}
static int expect_limit(int v) {
  struct rlimit limit;
  MUST(getrlimit(RLIMIT_CORE, &limit));
  return limit.rlim_max != RLIM_INFINITY && (rlim_t)v * 4096 > limit.rlim_max ? 0 : v;
}
static void set_filter(int v) {
  int file = open("/proc/self/coredump_filter", O_WRONLY | O_CLOEXEC);
  if (file < 0 || dprintf(file, "0x%x", v) < 0)
    fail("coredump_filter");
  close(file);
}
static int get_filter(void) {
  char text[16] = "";
  int file = open("/proc/self/coredump_filter", O_RDONLY | O_CLOEXEC);
  if (file < 0 || read(file, text, sizeof text - 1) < 1)
    fail("coredump_filter");
  close(file);
  return (int)strtol(text, 0, 16);
}
static void set_itimer(int v) {
  struct itimerval t = {.it_interval.tv_sec = 1000 * v, .it_value.tv_sec = 100000};
  MUST(setitimer(ITIMER_REAL, &t, 0));
}
static int get_itimer(void) {
  struct itimerval t;
  MUST(getitimer(ITIMER_REAL, &t));
  return (int)t.it_interval.tv_sec / 1000;
}
static timer_t timer;
static void set_timer(int v) {
  struct itimerspec t = {.it_interval.tv_sec = 1000 * v, .it_value.tv_sec = 100000};
  MUST(timer_settime(timer, 0, &t, 0));
}
static int get_timer(void) {
  struct itimerspec t;
  MUST(timer_gettime(timer, &t));
  return (int)t.it_interval.tv_sec / 1000;
}

// Descriptors.
static int file, other, again, target = 150, inner[2], event, epoll, watching, ticking, signals;
static void set_position(int v) {
  // Somebody else moves it, who has the same open file.
  pid_t child = fork();
  if (!child) {
    lseek(file, v, SEEK_SET);
    _exit(0);
  }
  MUST(waitpid(child, 0, 0));
}
static int get_position(void) { return (int)lseek(file, 0, SEEK_CUR); }
// One file, opened twice, and a third time.
static void set_duplicate(int v) {
  int from = v == 1 ? file : v == 2 ? other : again;
  MUST(dup2(from, target));
}
static int get_duplicate(void) {
  int found = 0, all[] = {file, other, again};
  for (int v = 1; v <= 3; v++) {
    off_t before = lseek(all[v - 1], 0, SEEK_CUR);
    MUST(lseek(all[v - 1], 7777, SEEK_SET));
    if (lseek(target, 0, SEEK_CUR) == 7777)
      found = v;
    MUST(lseek(all[v - 1], before, SEEK_SET));
  }
  return found;
}
static void set_flags(int v) {
  MUST(fcntl(inner[0], F_SETFL, v & 1 ? O_NONBLOCK : 0));
  MUST(fcntl(inner[0], F_SETFD, v & 2 ? FD_CLOEXEC : 0));
}
static int get_flags(void) {
  return (fcntl(inner[0], F_GETFL) & O_NONBLOCK ? 1 : 0) | (fcntl(inner[0], F_GETFD) & FD_CLOEXEC ? 2 : 0);
}
static void set_contents(int v) {
  char bytes[16];
  int waiting;
  MUST(ioctl(inner[0], FIONREAD, &waiting));
  if (waiting)
    MUST(read(inner[0], bytes, sizeof bytes));
  MUST(write(inner[1], "xxx", (size_t)v));
}
static int get_contents(void) {
  int waiting;
  MUST(ioctl(inner[0], FIONREAD, &waiting));
  return waiting;
}
// Other pipes under the same numbers.
static int outer[2] = {160, 161};
static void set_pipe(int v) {
  int ends[2];
  MUST(pipe(ends));
  for (int i = 0; i < 2; i++) {
    MUST(dup2(ends[i], outer[i]));
    close(ends[i]);
  }
  MUST(write(outer[1], "xxx", (size_t)v));
}
static int get_pipe(void) {
  int waiting;
  MUST(ioctl(outer[0], FIONREAD, &waiting));
  return waiting;
}
static void set_event(int v) {
  uint64_t count;
  if (read(event, &count, 8) < 0 && errno != EAGAIN)
    fail("eventfd");
  count = (uint64_t)v;
  MUST(write(event, &count, 8));
}
static int get_event(void) {
  uint64_t count = 0;
  if (read(event, &count, 8) == 8)
    MUST(write(event, &count, 8));
  return (int)count;
}
static void set_epoll(int v) {
  struct epoll_event e = {.events = EPOLLOUT, .data.u32 = (uint32_t)v};
  MUST(epoll_ctl(epoll, EPOLL_CTL_MOD, inner[1], &e));
}
static void set_watches(int v) { // 1: none
  struct epoll_event e = {.events = EPOLLOUT, .data.u32 = (uint32_t)v};
  epoll_ctl(watching, EPOLL_CTL_DEL, inner[1], 0);
  if (v > 1)
    MUST(epoll_ctl(watching, EPOLL_CTL_ADD, inner[1], &e));
}
static int get_watches(void) {
  struct epoll_event e = {.data.u32 = 1};
  MUST(epoll_wait(watching, &e, 1, 0));
  return (int)e.data.u32;
}
static int get_epoll(void) {
  struct epoll_event e = {0};
  MUST(epoll_wait(epoll, &e, 1, 0));
  return (int)e.data.u32;
}
static void set_ticking(int v) {
  struct itimerspec t = {.it_interval.tv_sec = 1000 * v, .it_value.tv_sec = 100000};
  MUST(timerfd_settime(ticking, 0, &t, 0));
}
static int get_ticking(void) {
  struct itimerspec t;
  MUST(timerfd_gettime(ticking, &t));
  return (int)t.it_interval.tv_sec / 1000;
}
static void set_signals(int v) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, v);
  MUST(signalfd(signals, &set, 0));
}
static int get_signals(void) {
  char path[64], text[1024] = "";
  snprintf(path, sizeof path, "/proc/self/fdinfo/%d", signals);
  int info = open(path, O_RDONLY | O_CLOEXEC);
  if (info < 0 || read(info, text, sizeof text - 1) < 1)
    fail("fdinfo");
  close(info);
  char *mask = strstr(text, "sigmask:");
  return mask ? __builtin_ffsl((long)strtoul(mask + 8, 0, 16)) : 0;
}

// Mappings.
static char *place, *dropped, *protected, *shared;
static void set_place(int v) {
  if (mmap(place, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != place)
    fail("mmap");
  place[PAGE * v] = (char)v;
}
static int get_place(void) { return place[0] * 1000 + place[PAGE] + place[2 * PAGE] + place[3 * PAGE]; }
static void set_dropped(int v) {
  MUST(mprotect(dropped, 4 * PAGE, PROT_NONE));
  MUST(madvise(dropped, 4 * PAGE, MADV_DONTNEED));
  MUST(mprotect(dropped, 4 * PAGE, PROT_READ | PROT_WRITE));
  if (v != 2)
    dropped[PAGE] = (char)v;
}
static int get_dropped(void) { return dropped[PAGE]; }
static int expect_dropped(int v) { return v == 2 ? 0 : v; }
static void set_protected(int v) { MUST(mprotect(protected + PAGE, PAGE, v == 1 ? PROT_READ : v == 2 ? PROT_READ | PROT_WRITE : PROT_NONE)); }
static int get_protected(void) {
  // Whether the kernel can read there, and write.
  int ends[2], readable, writable;
  MUST(pipe(ends));
  readable = write(ends[1], protected + PAGE, 1) == 1;
  if (!readable)
    MUST(write(ends[1], "", 1));
  writable = read(ends[0], protected + PAGE, 1) == 1;
  close(ends[0]), close(ends[1]);
  return writable ? 2 : readable ? 1 : 3;
}
static void set_shared(int v) { shared[PAGE] = (char)v; }
static int get_shared(void) { return shared[PAGE]; }

static int same(int v) { return v; }
static struct kind {
  const char *name;
  void (*set)(int);
  int (*get)(void);
  int (*expect)(int);
} kinds[] = {
    {"mask", set_mask, get_mask, same},
    {"alternate stack", set_stack, get_stack, same},
    {"name", set_name, get_name, same},
    {"timer slack", set_slack, get_slack, same},
    {"robust list", set_robust, get_robust, same},
    {"priority", set_nice, get_nice, same},
    {"priority of input and output", set_io, get_io, same},
    {"affinity", set_affinity, get_affinity, expect_affinity},
    {"a thread with the id of another one", set_passing, get_passing, same},
    {"action of a signal", set_handler, get_handler, same},
    {"current directory", set_directory, get_directory, same},
    {"umask", set_umask, get_umask, same},
    {"limit", set_limit, get_limit, expect_limit},
    {"core dump filter", set_filter, get_filter, same},
    {"interval timer", set_itimer, get_itimer, same},
    {"POSIX timer", set_timer, get_timer, same},
    {"offset", set_position, get_position, same},
    {"duplicate", set_duplicate, get_duplicate, same},
    {"flags", set_flags, get_flags, same},
    {"contents of a pipe", set_contents, get_contents, same},
    {"another pipe", set_pipe, get_pipe, same},
    {"eventfd", set_event, get_event, same},
    {"epoll", set_epoll, get_epoll, same},
    {"watches", set_watches, get_watches, same},
    {"timerfd", set_ticking, get_ticking, same},
    {"signalfd", set_signals, get_signals, same},
    {"a mapping in the place of an equal one", set_place, get_place, same},
    {"dropped pages", set_dropped, get_dropped, expect_dropped},
    {"protection", set_protected, get_protected, same},
    {"shared memory", set_shared, get_shared, same},
};

static void begin(void) {
  pthread_t t;
  for (int v = 1; v <= 3; v++) {
    char path[] = "directory0";
    path[9] = (char)('0' + v);
    if (mkdir(path, 0755) && errno != EEXIST)
      fail("mkdir");
    int folder = open(path, O_RDONLY | O_DIRECTORY);
    MUST(dup2(folder, 200 + v));
    close(folder);
  }
  MUST(file = open("file", O_RDWR | O_CREAT, 0644));
  MUST(other = open("file", O_RDWR));
  MUST(again = open("file", O_RDWR));
  MUST(pipe(inner));
  MUST(event = eventfd(0, EFD_NONBLOCK));
  MUST(epoll = epoll_create1(0));
  MUST(watching = epoll_create1(0));
  struct epoll_event e = {.events = EPOLLOUT};
  MUST(epoll_ctl(epoll, EPOLL_CTL_ADD, inner[1], &e));
  MUST(ticking = timerfd_create(CLOCK_MONOTONIC, 0));
  sigset_t none;
  sigemptyset(&none);
  MUST(signals = signalfd(-1, &none, 0));
  struct sigevent nobody = {.sigev_notify = SIGEV_NONE};
  MUST(timer_create(CLOCK_MONOTONIC, &nobody, &timer));
  place = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  dropped = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  protected = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  shared = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  // The first of its list is the one that the C library has set.
  if (pthread_create(&t, 0, worker, 0))
    fail("pthread_create");
  while (there(mask_of, 0) < 0 || !worker_tid)
    sched_yield();
}

static void check(struct kind *kind, int value, const char *where) {
  int found = kind->get(), wanted = kind->expect(value);
  if (found != wanted) {
    fprintf(stderr, "%s: %d %s, which should be %d\n", kind->name, found, where, wanted);
    exit(1);
  }
}

static void must_not_return(int code) {
  fprintf(stderr, "%s: %s\n", at, sp_strerror(code));
  exit(1);
}

int main(int argc, char **argv) {
  int turns = argc > 1 ? atoi(argv[1]) : 1, kinds_there = sizeof kinds / sizeof kinds[0];
  uint64_t base, first, second;
  begin();
  // With one that stays, each further one is a repeated one.
  if (sp_snapshot(&base))
    must_not_return(-1);
  for (int turn = 0; turn < turns * kinds_there; turn++) {
    struct kind *kind = &kinds[turn % kinds_there];
    at = kind->name;
    kind->set(1);
    int came = sp_snapshot(&first);
    if (came < 0)
      must_not_return(came);
    if (came == 0) {
      kind->set(2);
      int came_again = sp_snapshot(&second);
      if (came_again < 0)
        must_not_return(came_again);
      if (came_again == 0) {
        kind->set(3);
        check(kind, 3, "before it goes back");
        must_not_return(sp_rollback(second, 1));
      }
      check(kind, 2, "at the second snapshot");
      // What memory has of the second one is gone at the first.
      must_not_return(sp_rollback(first, (int)second));
    }
    check(kind, 1, "at the first snapshot");
    if (sp_commit((uint64_t)came) || sp_commit(first))
      must_not_return(-1);
  }
  end_passing();
  puts("ok");
  return 0;
}
