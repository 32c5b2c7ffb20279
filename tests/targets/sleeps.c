// Interrupted system calls: each goes on after the cut as if nothing had been, for the time that is left.
#include "target.h"
#include <poll.h>
#include <semaphore.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

// How long each waits; the cut comes when half of it has passed.
#define DURATION 2.0
#define LATE 0.7

static double began;

static void begin(void) {
  watch_the_clock();
  ready();
  began = now();
}

// A relative wait is neither cut short nor restarted: by the program's clock, which goes on a moment before the program does,
// it lasts its time at least, and at most that besides what the program was away.
static int lasts(double want, double lasted, double without) {
  CHECK(lasted > want - 0.02);
  IN_TIME(lasted - without < want + LATE);
  return lasted > want - 0.02 && lasted - without < want + LATE;
}

static void check_relative(void) {
  double lasted = now() - began;
  if (!lasts(DURATION, lasted, away))
    say("waited %.3f s, in which it was away for %.3f s, expected %.3f", lasted, away, DURATION);
}

// A wait until a point in time ends then, or at once if it passed while the program was away.
static void check_deadline(double deadline, double at, double resumed) {
  double late = at - (deadline > resumed ? deadline : resumed);
  CHECK(at >= deadline - 0.02);
  IN_TIME(late <= LATE);
  if (at < deadline - 0.02 || late > LATE)
    say("woke %.3f s after the deadline, %.3f s late", at - deadline, late);
}

static void check_absolute(double deadline) {
  check_deadline(deadline, now(), resumed_at);
}

static void check_time_of_day(double deadline) {
  check_deadline(deadline, seconds(CLOCK_REALTIME), resumed_at_time_of_day);
}

static void relative_nanosleep(void) {
  struct timespec t = timespec_of(DURATION), rest = {0};
  begin();
  EQUAL(nanosleep(&t, &rest), 0);
  check_relative();
}

static void relative_clock_nanosleep(void) {
  struct timespec t = timespec_of(DURATION);
  begin();
  EQUAL(clock_nanosleep(CLOCK_MONOTONIC, 0, &t, 0), 0);
  check_relative();
}

static void absolute_clock_nanosleep(void) {
  begin();
  double deadline = began + DURATION;
  struct timespec t = timespec_of(deadline);
  EQUAL(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0), 0);
  check_absolute(deadline);
}

static volatile int is_awake;

static void *sleep_by_work(void *unused) {
  (void)unused;
  struct timespec half = timespec_of(0.5);
  EQUAL(clock_nanosleep(CLOCK_PROCESS_CPUTIME_ID, 0, &half, 0), 0);
  is_awake = 1;
  return 0;
}

static void relative_sleep_by_work(void) { // as long as it takes the process to have worked for half a second
  pthread_t sleeper;
  MUST(pthread_create(&sleeper, 0, sleep_by_work, 0) == 0);
  nap(1);
  cut();
  double from = seconds(CLOCK_PROCESS_CPUTIME_ID);
  nap(0.3);
  while (!is_awake && seconds(CLOCK_PROCESS_CPUTIME_ID) < from + 60)
    ;
  CHECK(seconds(CLOCK_PROCESS_CPUTIME_ID) >= from + 0.3);
  CHECK(is_awake);
  MUST(pthread_join(sleeper, 0) == 0);
}

static void poll_timeout(void) {
  int ends[2];
  MUST(pipe(ends) == 0);
  struct pollfd p = {.fd = ends[0], .events = POLLIN};
  begin();
  EQUAL(poll(&p, 1, DURATION * 1000), 0);
  check_relative();
}

static void ppoll_timeout(void) {
  int ends[2];
  MUST(pipe(ends) == 0);
  struct pollfd p = {.fd = ends[0], .events = POLLIN};
  struct timespec t = timespec_of(DURATION);
  sigset_t during, after;
  sigfillset(&during);
  sigdelset(&during, SIGTERM);
  begin();
  EQUAL(ppoll(&p, 1, &t, &during), 0);
  check_relative();
  pthread_sigmask(SIG_SETMASK, 0, &after);
  for (int s = 1; s < 32; s++)
    EQUAL(sigismember(&after, s), 0); // the mask for the wait is gone
}

static void select_timeout(void) {
  int ends[2];
  MUST(pipe(ends) == 0);
  fd_set set;
  FD_ZERO(&set);
  FD_SET(ends[0], &set);
  struct timeval t = {(time_t)DURATION, 0};
  begin();
  EQUAL(select(ends[0] + 1, &set, 0, 0, &t), 0);
  check_relative();
}

static void pselect_timeout(void) {
  fd_set set;
  FD_ZERO(&set);
  struct timespec t = timespec_of(DURATION);
  sigset_t during, after;
  sigemptyset(&during);
  sigaddset(&during, SIGUSR1);
  begin();
  EQUAL(pselect(0, &set, 0, 0, &t, &during), 0);
  check_relative();
  pthread_sigmask(SIG_SETMASK, 0, &after);
  EQUAL(sigismember(&after, SIGUSR1), 0);
}

// epoll_wait is one of the few calls that the kernel does not restart by itself (signal(7)). With a timeout an
// interruption is something every program has to expect; then it must be reported as such, and not early otherwise.
static void epoll_timeout(void) {
  int e = epoll_create1(0);
  struct epoll_event event;
  begin();
  int n = epoll_wait(e, &event, 1, DURATION * 1000);
  if (n < 0 && errno == EINTR) {
    wait_go();
    say("note: epoll_wait with a timeout was interrupted");
    return;
  }
  EQUAL(n, 0);
  check_relative();
}

static void futex_relative(void) {
  static int word;
  struct timespec t = timespec_of(DURATION);
  begin();
  EQUAL(syscall(SYS_futex, &word, 128 /* FUTEX_WAIT_PRIVATE */, 0, &t, 0, 0), -1);
  EQUAL(errno, ETIMEDOUT);
  check_relative();
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;

static void cond_timedwait(void) {
  begin();
  double deadline = seconds(CLOCK_REALTIME) + DURATION;
  struct timespec t = timespec_of(deadline);
  pthread_mutex_lock(&lock);
  EQUAL(pthread_cond_timedwait(&condition, &lock, &t), ETIMEDOUT);
  EQUAL(pthread_mutex_unlock(&lock), 0);
  check_time_of_day(deadline);
}

static volatile int is_held;

static void *hold_lock(void *unused) {
  pthread_mutex_lock(&lock);
  is_held = 1;
  for (;;)
    nap(1);
  return unused;
}

static void mutex_timedlock(void) {
  spawn(hold_lock, 0);
  while (!is_held)
    nap(0.001);
  begin();
  double deadline = seconds(CLOCK_REALTIME) + DURATION;
  struct timespec t = timespec_of(deadline);
  EQUAL(pthread_mutex_timedlock(&lock, &t), ETIMEDOUT);
  check_time_of_day(deadline);
}

static void sem_timed(void) {
  sem_t s;
  sem_init(&s, 0, 0);
  begin();
  double deadline = seconds(CLOCK_REALTIME) + DURATION;
  struct timespec t = timespec_of(deadline);
  EQUAL(sem_timedwait(&s, &t), -1);
  EQUAL(errno, ETIMEDOUT);
  check_time_of_day(deadline);
}

static void sigtimedwait_timeout(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigprocmask(SIG_BLOCK, &set, 0);
  struct timespec t = timespec_of(DURATION);
  begin();
  int result = sigtimedwait(&set, 0, &t);
  EQUAL(result, -1);
  if (errno == EINTR) {
    wait_go();
    say("note: sigtimedwait was interrupted");
    return;
  }
  EQUAL(errno, EAGAIN);
  check_relative();
}

static void receive_timeout(void) {
  int s[2];
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0);
  struct timeval t = {(time_t)DURATION, 0};
  MUST(setsockopt(s[0], SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t) == 0);
  char c;
  begin();
  ssize_t n = recv(s[0], &c, 1, 0);
  EQUAL(n, -1);
  if (errno == EINTR) { // as signal(7) has it for sockets with a timeout
    wait_go();
    say("note: recv with a timeout was interrupted");
    return;
  }
  EQUAL(errno, EAGAIN);
  check_relative();
}

// Several threads at once, each with another time left.
static void *staggered_thread(void *argument) {
  double want = (double)(long)argument / 10, from = now(), was_away = away;
  struct timespec t = timespec_of(want);
  EQUAL(nanosleep(&t, 0), 0);
  double lasted = now() - from;
  if (!lasts(want, lasted, away - was_away))
    say("a sleep of %.1f s took %.3f s, in which it was away for %.3f s", want, lasted, away - was_away);
  return 0;
}

static void staggered(void) {
  pthread_t t[12];
  begin();
  for (long i = 0; i < 12; i++)
    t[i] = spawn(staggered_thread, (void *)(13 + i * 2));
  for (int i = 0; i < 12; i++)
    pthread_join(t[i], 0);
}

// --- waits without end: they must not see EINTR, and must see what they wait for

static int wake_fd;
static pid_t waiter;

static void *write_a_byte(void *unused) {
  wait_go();
  nap(0.05);
  EQUAL(write(wake_fd, "x", 1), 1);
  return unused;
}

static void begin_endless(int fd) {
  wake_fd = fd;
  spawn(write_a_byte, 0);
  ready();
}

static void pipe_read(void) {
  int ends[2];
  char c = 0;
  MUST(pipe(ends) == 0);
  begin_endless(ends[1]);
  EQUAL(read(ends[0], &c, 1), 1);
  EQUAL(c, 'x');
  CHECK(gone());
}

static void socket_receive(void) {
  int s[2];
  char c = 0;
  MUST(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, s) == 0);
  begin_endless(s[1]);
  EQUAL(recv(s[0], &c, 1, 0), 1);
  EQUAL(c, 'x');
  CHECK(gone());
}

// A write that waits half-way: the count of what was written must be right in the end.
static char *stream;
static size_t drained;
#define STREAM (1u << 20)

static void *drain(void *argument) {
  int fd = (int)(long)argument;
  wait_go();
  static char got[STREAM];
  while (drained < STREAM) {
    ssize_t n = read(fd, got + drained, STREAM - drained);
    if (n <= 0)
      break;
    drained += n;
  }
  CHECK(!memcmp(got, stream, STREAM));
  return 0;
}

static void pipe_write(void) {
  int ends[2];
  MUST(pipe(ends) == 0);
  stream = malloc(STREAM);
  fill(stream, STREAM, 3);
  pthread_t t = spawn(drain, (void *)(long)ends[0]);
  ready();
  size_t sent = 0;
  int calls = 0;
  while (sent < STREAM) { // a cut may make a write short, as any stop would; none may be lost or doubled
    ssize_t n = write(ends[1], stream + sent, STREAM - sent);
    CHECK(n > 0);
    if (n <= 0)
      break;
    sent += n;
    calls++;
  }
  pthread_join(t, 0);
  EQUAL(sent, STREAM);
  EQUAL(drained, STREAM);
  if (calls > 1)
    say("note: the write was cut in %d", calls);
}

static void poll_endless(void) {
  int ends[2];
  MUST(pipe(ends) == 0);
  struct pollfd p = {.fd = ends[0], .events = POLLIN};
  begin_endless(ends[1]);
  EQUAL(poll(&p, 1, -1), 1);
  CHECK(gone());
}

static void select_endless(void) {
  int ends[2];
  MUST(pipe(ends) == 0);
  fd_set set;
  FD_ZERO(&set);
  FD_SET(ends[0], &set);
  begin_endless(ends[1]);
  EQUAL(select(ends[0] + 1, &set, 0, 0, 0), 1);
  CHECK(gone());
}

static void epoll_endless(void) {
  int ends[2], e = epoll_create1(0);
  MUST(pipe(ends) == 0);
  struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0x123456789abcdefull};
  MUST(epoll_ctl(e, EPOLL_CTL_ADD, ends[0], &event) == 0);
  memset(&event, 0, sizeof event);
  begin_endless(ends[1]);
  EQUAL(epoll_wait(e, &event, 1, -1), 1);
  EQUAL(event.data.u64, 0x123456789abcdefull);
  CHECK(gone());
}

static void *add_five(void *argument) {
  uint64_t five = 5;
  wait_go();
  EQUAL(write((int)(long)argument, &five, 8), 8);
  return 0;
}

static void eventfd_wait(void) {
  int fd = eventfd(0, 0);
  uint64_t n = 0;
  ready();
  spawn(add_five, (void *)(long)fd);
  EQUAL(read(fd, &n, 8), 8);
  EQUAL(n, 5);
  CHECK(gone());
}

static void timerfd_read(void) {
  int fd = timerfd_create(CLOCK_MONOTONIC, 0);
  begin();
  struct itimerspec s = {.it_value = timespec_of(DURATION)};
  MUST(timerfd_settime(fd, 0, &s, 0) == 0);
  uint64_t n = 0;
  EQUAL(read(fd, &n, 8), 8);
  EQUAL(n, 1);
  lasts(DURATION, now() - began, away);
}

static void *raise_usr1(void *how) {
  wait_go();
  nap(0.05);
  if ((long)how)
    syscall(SYS_tgkill, getpid(), waiter, SIGUSR1);
  else
    kill(getpid(), SIGUSR1);
  return 0;
}

static volatile sig_atomic_t handled;

static void handler(int s) {
  (void)s;
  handled++;
}

static void sigwait_endless(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigprocmask(SIG_BLOCK, &set, 0);
  spawn(raise_usr1, 0);
  ready();
  int s = 0;
  EQUAL(sigwait(&set, &s), 0);
  EQUAL(s, SIGUSR1);
  CHECK(gone());
}

static void sigwaitinfo_endless(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigprocmask(SIG_BLOCK, &set, 0);
  spawn(raise_usr1, 0);
  ready();
  siginfo_t info;
  EQUAL(sigwaitinfo(&set, &info), SIGUSR1);
  EQUAL(info.si_pid, getpid());
  CHECK(gone());
}

static void pause_endless(void) {
  waiter = getpid();
  signal(SIGUSR1, handler);
  spawn(raise_usr1, (void *)1);
  ready();
  EQUAL(pause(), -1);
  EQUAL(errno, EINTR);
  EQUAL(handled, 1);
  CHECK(gone());
}

static void sigsuspend_endless(void) {
  sigset_t block, during, after;
  waiter = getpid();
  signal(SIGUSR1, handler);
  sigemptyset(&block);
  sigaddset(&block, SIGUSR1);
  sigaddset(&block, SIGUSR2);
  sigprocmask(SIG_BLOCK, &block, 0);
  spawn(raise_usr1, (void *)1);
  sigfillset(&during);
  sigdelset(&during, SIGUSR1);
  ready();
  EQUAL(sigsuspend(&during), -1);
  EQUAL(errno, EINTR);
  EQUAL(handled, 1);
  CHECK(gone());
  sigprocmask(SIG_BLOCK, 0, &after);
  for (int s = 1; s < 32; s++)
    EQUAL(sigismember(&after, s), s == SIGUSR1 || s == SIGUSR2);
}

static sem_t semaphore;

static void *post(void *unused) {
  wait_go();
  sem_post(&semaphore);
  return unused;
}

static void sem_endless(void) {
  sem_init(&semaphore, 0, 0);
  spawn(post, 0);
  ready();
  EQUAL(sem_wait(&semaphore), 0);
  CHECK(gone());
}

static int flag;

static void *signal_condition(void *unused) {
  wait_go();
  pthread_mutex_lock(&lock);
  flag = 1;
  pthread_cond_signal(&condition);
  pthread_mutex_unlock(&lock);
  return unused;
}

static void cond_endless(void) {
  spawn(signal_condition, 0);
  ready();
  pthread_mutex_lock(&lock);
  while (!flag)
    EQUAL(pthread_cond_wait(&condition, &lock), 0);
  pthread_mutex_unlock(&lock);
  CHECK(gone());
}

static void *unlock_file(void *argument) {
  wait_go();
  EQUAL(flock((int)(long)argument, LOCK_UN), 0);
  return 0;
}

static void flock_endless(void) {
  int a = open(path_of("locked"), O_RDWR | O_CREAT, 0600), b = open(path_of("locked"), O_RDWR);
  MUST(a >= 0 && b >= 0 && flock(a, LOCK_EX) == 0);
  spawn(unlock_file, (void *)(long)a);
  ready();
  EQUAL(flock(b, LOCK_EX), 0);
  CHECK(gone());
}

static void *push_signal(void *unused) {
  wait_go();
  kill(getpid(), SIGUSR2);
  return unused;
}

static void signalfd_read(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  sigprocmask(SIG_BLOCK, &set, 0);
  int fd = signalfd(-1, &set, SFD_CLOEXEC);
  spawn(push_signal, 0);
  ready();
  struct signalfd_siginfo info;
  EQUAL(read(fd, &info, sizeof info), (ssize_t)sizeof info);
  EQUAL(info.ssi_signo, SIGUSR2);
  CHECK(gone());
}

static void *write_later(void *unused) {
  wait_go();
  nap(0.3);
  EQUAL(write(wake_fd, "y", 1), 1);
  return unused;
}

// A call that a handler interrupts after the cut restarts (SA_RESTART) or returns EINTR (without), as always.
static void restart_after(void) {
  int ends[2];
  char c = 0;
  MUST(pipe(ends) == 0);
  waiter = getpid();
  struct sigaction a = {.sa_handler = handler, .sa_flags = SA_RESTART};
  sigaction(SIGUSR1, &a, 0);
  spawn(raise_usr1, (void *)1);
  ready();
  wake_fd = ends[1];
  spawn(write_later, 0);
  EQUAL(read(ends[0], &c, 1), 1);
  EQUAL(handled, 1);
}

static void interrupted_after(void) {
  waiter = getpid();
  struct sigaction a = {.sa_handler = handler};
  sigaction(SIGUSR1, &a, 0);
  spawn(raise_usr1, (void *)1);
  ready();
  struct timespec t = {1000, 0}, rest = {0};
  EQUAL(nanosleep(&t, &rest), -1);
  EQUAL(errno, EINTR);
  EQUAL(handled, 1);
  CHECK(rest.tv_sec > 900 && rest.tv_sec < 1000);
  CHECK(gone());
}

SCENARIOS({"relative_nanosleep", relative_nanosleep}, {"relative_clock_nanosleep", relative_clock_nanosleep},
          {"absolute_clock_nanosleep", absolute_clock_nanosleep}, {"relative_sleep_by_work", relative_sleep_by_work}, {"poll_timeout", poll_timeout},
          {"ppoll_timeout", ppoll_timeout}, {"select_timeout", select_timeout}, {"pselect_timeout", pselect_timeout},
          {"epoll_timeout", epoll_timeout}, {"futex_relative", futex_relative}, {"cond_timedwait", cond_timedwait},
          {"mutex_timedlock", mutex_timedlock}, {"sem_timed", sem_timed},
          {"sigtimedwait_timeout", sigtimedwait_timeout}, {"receive_timeout", receive_timeout},
          {"staggered", staggered}, {"timerfd_read", timerfd_read}, {"pipe_read", pipe_read},
          {"socket_receive", socket_receive}, {"pipe_write", pipe_write}, {"poll_endless", poll_endless},
          {"select_endless", select_endless}, {"epoll_endless", epoll_endless}, {"eventfd_read", eventfd_wait},
          {"sigwait_endless", sigwait_endless}, {"sigwaitinfo_endless", sigwaitinfo_endless},
          {"pause_endless", pause_endless}, {"sigsuspend_endless", sigsuspend_endless}, {"sem_endless", sem_endless},
          {"cond_endless", cond_endless}, {"flock_endless", flock_endless}, {"signalfd_read", signalfd_read},
          {"restart_after", restart_after}, {"interrupted_after", interrupted_after})
