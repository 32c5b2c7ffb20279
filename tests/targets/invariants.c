// A program of threads that check, all the time, that nobody touches what is theirs. Each thread counts its rounds in
// DIRECTORY/counters (a shared mapping, for the harness to read); whatever goes wrong is counted there too, and said.
#include "dispatch.h"
#include "hold.h"
#include <poll.h>
#include <sys/epoll.h>

enum { GENERAL, VECTORS, X87, RED_ZONE, SMALL_STACK, MEMORY, MASK, DESCRIPTORS, SLEEP, PIPE, EPOLL, SIGNALS, KINDS };
static const char *names[] = {"general", "vectors", "x87",  "redzone", "smallstack", "memory",
                              "mask",    "files",   "naps", "pipe",    "epoll",      "signals"};

struct counters {
  uint64_t rounds[16];
  uint64_t wrong;
  uint64_t interrupted;
};
static volatile struct counters *counters;
static volatile int stop;

#define HOLDS(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      __atomic_add_fetch(&counters->wrong, 1, __ATOMIC_SEQ_CST);                                                       \
      CHECK(condition);                                                                                                \
    }                                                                                                                  \
  } while (0)

static uint64_t mask_now(void) {
  uint64_t mask = 0;
  syscall(SYS_rt_sigprocmask, SIG_BLOCK, 0, &mask, 8);
  return mask;
}

static void round_of_general(void) {
  HOLDS(hold_general(&hold_stop, 0) == 0);
  HOLDS(hold_general(&hold_stop, 1) == 1 << 16);
}

static struct vectors *want, *got;

static void round_of_vectors(void) {
  long kind = hold_has(2) ? 2 : hold_has(1) ? 1 : 0;
  size_t bytes = kind == 0 ? 16 : kind == 1 ? 32 : 64;
  if (!want) {
    want = aligned_alloc(64, sizeof *want);
    got = aligned_alloc(64, sizeof *got);
    fill(want, sizeof *want, 5);
    for (int i = 0; i < 8; i++)
      want->mask[i] &= hold_mask_bits();
  }
  memset(got, 0, sizeof *got);
  hold_vectors(kind, want, got, &hold_stop);
  for (int r = 0; r < (kind == 2 ? 32 : 16); r++)
    HOLDS(!memcmp(want->v[r], got->v[r], bytes));
  for (int i = 0; i < 8 && kind == 2; i++)
    HOLDS(want->mask[i] == got->mask[i]);
}

static void round_of_x87(void) {
  static unsigned char before[512] __attribute__((aligned(16))), after[512] __attribute__((aligned(16)));
  hold_x87(before, after, &hold_stop);
  HOLDS(!memcmp(before, after, 5) && !memcmp(before + 24, after + 24, 4) && !memcmp(before + 32, after + 32, 128));
}

static void round_of_red_zone(void) {
  HOLDS(hold_red_zone(&hold_stop) == 0);
}

static unsigned char *arena;

static void round_of_small_stack(void) { // with live data right below the red zone
  if (!arena) {
    arena = map_anon(16384);
    fill(arena, 8192, 5);
  }
  hold_small_stack(arena + 8192 + 128, &hold_stop);
  HOLDS(filled(arena, 8192, 5));
}

#define CELLS (1024 * 512)
static uint64_t *cells, cells_sum, cells_seed;

static void round_of_memory(void) {
  if (!cells)
    cells = map_anon(CELLS * 8);
  for (int i = 0; i < 20000; i++) {
    uint64_t r = mix(cells_seed++);
    cells[r % CELLS] += r >> 40;
    cells_sum += r >> 40;
  }
  if (cells_seed % 400000 == 0) {
    uint64_t sum = 0;
    for (int i = 0; i < CELLS; i++)
      sum += cells[i];
    HOLDS(sum == cells_sum);
  }
  nap(0.001);
  give_way(0.004);
}

static void round_of_mask(void) {
  uint64_t mask = mix(counters->rounds[MASK]) & ~(1ull << (SIGKILL - 1)) & ~(1ull << (SIGSTOP - 1));
  syscall(SYS_rt_sigprocmask, SIG_SETMASK, &mask, 0, 8);
  nap(0.003);
  HOLDS(mask_now() == mask);
}

static struct stat known[64];
static char known_set[64];

static void round_of_descriptors(void) {
  static int first = 1;
  for (int fd = 0; fd < 64; fd++) {
    struct stat s;
    int open = fstat(fd, &s) == 0;
    if (first) {
      known_set[fd] = open;
      known[fd] = s;
      continue;
    }
    // A checkpointer that is killed while it has a descriptor made in us leaves it to the thread that it had borrowed to
    // close it; other threads may run before that one does.
    for (int looks = 0; open && !known_set[fd] && looks < 200; looks++) {
      nap(0.001);
      open = fstat(fd, &s) == 0;
    }
    HOLDS(open == known_set[fd] && (!open || (s.st_rdev == known[fd].st_rdev && s.st_mode == known[fd].st_mode)));
  }
  first = 0;
  nap(0.003);
}

static void round_of_sleep(void) {
  double from = now();
  struct timespec t = {0, 4000000};
  HOLDS(nanosleep(&t, 0) == 0);
  HOLDS(now() - from >= 0.004);
  struct timespec d = timespec_of(now() + 0.003);
  HOLDS(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &d, 0) == 0);
  struct pollfd none = {.fd = -1};
  from = now();
  HOLDS(poll(&none, 1, 5) == 0);
  HOLDS(now() - from >= 0.004);
}

static int ends[2][2], poller;

static void round_of_pipe(void) {
  uint64_t n = 0;
  HOLDS(read(ends[0][0], &n, 8) == 8);
  HOLDS(n == counters->rounds[PIPE] || stop);
}

static void round_of_epoll(void) {
  struct epoll_event e = {0};
  int n;
  // epoll_wait is among the calls that any stop may interrupt (signal(7)): a checkpointer that is killed between stopping
  // a thread and setting its registers right leaves it at that.
  while ((n = epoll_wait(poller, &e, 1, -1)) < 0 && errno == EINTR)
    counters->interrupted++;
  HOLDS(n == 1);
  uint64_t v = 0;
  if (n == 1)
    HOLDS(e.data.u64 == 0x0123456789abcdef && read(ends[1][0], &v, 8) == 8 && (v == counters->rounds[EPOLL] || stop));
}

static void *feed(void *unused) {
  for (uint64_t i = 0; !stop; i++) {
    nap(0.004);
    HOLDS(write(ends[0][1], &i, 8) == 8);
    HOLDS(write(ends[1][1], &i, 8) == 8);
  }
  uint64_t end = 0;
  HOLDS(write(ends[0][1], &end, 8) == 8);
  HOLDS(write(ends[1][1], &end, 8) == 8);
  return unused;
}

static __thread uint64_t signals_seen, signals_wrong;

static void on_signal(int s, siginfo_t *info, void *context) {
  (void)s, (void)context;
  if ((uint64_t)(uintptr_t)info->si_value.sival_ptr != signals_seen)
    signals_wrong++;
  signals_seen++;
}

static void round_of_signals(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGRTMIN + 7);
  pthread_sigmask(SIG_BLOCK, &set, 0);
  uint64_t from = signals_seen;
  for (int i = 0; i < 8; i++) {
    siginfo_t info;
    memset(&info, 0, sizeof info);
    info.si_code = SI_QUEUE;
    info.si_value.sival_ptr = (void *)(from + i);
    HOLDS(syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), SIGRTMIN + 7, &info) == 0);
  }
  nap(0.003);
  HOLDS(signals_seen == from);
  pthread_sigmask(SIG_UNBLOCK, &set, 0);
  HOLDS(signals_seen == from + 8 && !signals_wrong);
}

static void (*const rounds[])(void) = {round_of_general, round_of_vectors, round_of_x87,         round_of_red_zone,
                                       round_of_small_stack, round_of_memory, round_of_mask, round_of_descriptors,
                                       round_of_sleep,   round_of_pipe,    round_of_epoll,       round_of_signals};

static struct dispatch of_threads[KINDS + 1];
static int dispatches;

static void *run(void *argument) {
  long kind = (long)argument;
  pthread_setname_np(pthread_self(), names[kind]);
  if (dispatches && kind != MASK) // which blocks SIGSYS as well
    MUST(begin_dispatch(&of_threads[kind]));
  while (!stop) {
    HOLDS(!mine || is_dispatched());
    rounds[kind]();
    counters->rounds[kind]++;
    if (kind <= SMALL_STACK)
      nap(0.002);
  }
  if (mine)
    end_dispatch();
  return 0;
}

static void everything(void) {
  int fd = open(path_of("counters"), O_RDWR | O_CREAT, 0600);
  MUST(fd >= 0 && ftruncate(fd, PAGE) == 0);
  counters = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  MUST(counters != MAP_FAILED);
  MUST(pipe(ends[0]) == 0 && pipe(ends[1]) == 0 && (poller = epoll_create1(0)) >= 0);
  struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0x0123456789abcdef};
  MUST(epoll_ctl(poller, EPOLL_CTL_ADD, ends[1][0], &e) == 0);
  struct sigaction a = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
  sigaction(SIGRTMIN + 7, &a, 0);
  pthread_t t[KINDS], feeder;
  for (int i = 0; dispatches && i <= KINDS; i++)
    of_threads[i] = within_library();
  if (dispatches) {
    handle_dispatch();
    MUST(begin_dispatch(&of_threads[KINDS]));
  }
  for (long i = 0; i < KINDS; i++)
    t[i] = spawn(run, (void *)i);
  feeder = spawn(feed, 0);
  // Ready once every thread has found its feet: no mapping comes or goes from then on.
  int settled = 0;
  while (!gone()) {
    HOLDS(!mine || is_dispatched());
    int slowest = 1000;
    for (int i = 0; i < KINDS && !settled; i++)
      slowest = counters->rounds[i] < (uint64_t)slowest ? (int)counters->rounds[i] : slowest;
    if (!settled && slowest >= 5) {
      settled = 1;
      ready();
    } // sets the spinning threads free, now and then
    hold_stop = 0;
    nap(0.003);
    hold_stop = 1;
    nap(0.001);
    give_way(0.02);
  }
  stop = 1;
  hold_stop = 1;
  for (int i = 0; i < KINDS; i++)
    pthread_join(t[i], 0);
  pthread_join(feeder, 0);
  EQUAL(counters->wrong, 0);
  for (int i = 0; i < KINDS; i++)
    CHECK(counters->rounds[i] > 0);
}

static void dispatching(void) { // the same, while all threads but one dispatch calls from outside of the library to themselves
  dispatches = 1;
  everything();
}

SCENARIOS({"everything", everything}, {"dispatching", dispatching})
