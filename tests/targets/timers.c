// Timers: interval timers, POSIX timers with their ids, and timer descriptors.
#include "target.h"
#include <sys/time.h>
#include <sys/timerfd.h>

static double left(const struct itimerspec *s) {
  return s->it_value.tv_sec + s->it_value.tv_nsec / 1e9;
}

static struct itimerspec every(double first, double then) {
  return (struct itimerspec){.it_value = timespec_of(first), .it_interval = timespec_of(then)};
}

// What is left of a timer lies between what was left at the cut and that minus the time that was lived since.
#define PLAUSIBLE(rest, before, lived)                                                                                 \
  do {                                                                                                                 \
    double rest_ = (rest), before_ = (before), lived_ = (lived);                                                       \
    CHECK(rest_ <= before_ + 0.05);                                                                                    \
    IN_TIME(rest_ >= before_ - lived_ - 0.5);                                                                          \
    if (rest_ > before_ + 0.05 || rest_ < before_ - lived_ - 0.5)                                                      \
      say("%s: %.3f s left, %.3f s before, lived %.3f s", #rest, rest_, before_, lived_);                              \
  } while (0)

static void interval_timers(void) {
  static const int which[] = {ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF};
  watch_the_clock();
  double from = now();
  for (int i = 0; i < 3; i++) {
    struct itimerval v = {.it_value = {500 + i, 0}, .it_interval = {i, 250000}};
    MUST(setitimer(which[i], &v, 0) == 0);
  }
  cut();
  for (int i = 0; i < 3; i++) {
    struct itimerval v = {0};
    EQUAL(getitimer(which[i], &v), 0);
    PLAUSIBLE(v.it_value.tv_sec + v.it_value.tv_usec / 1e6, 500.0 + i, now() - from);
    CHECK(v.it_value.tv_sec > 300);
    EQUAL(v.it_interval.tv_sec, i);
    EQUAL(v.it_interval.tv_usec, 250000);
  }
}

static volatile int alarms;

static void on_alarm(int s) {
  (void)s;
  alarms++;
}

static void interval_fires(void) {
  signal(SIGALRM, on_alarm);
  struct itimerval v = {.it_value = {0, 20000}, .it_interval = {0, 20000}};
  MUST(setitimer(ITIMER_REAL, &v, 0) == 0);
  while (alarms < 2)
    nap(0.005);
  cut();
  int seen = alarms;
  double from = now();
  while (alarms < seen + 5 && now() - from < 60)
    nap(0.02);
  CHECK(alarms >= seen + 5 && alarms <= seen + 2 + (now() - from) / 0.02);
}

static void pending_alarm(void) { // expired with its signal blocked: it stands still until that is taken, and goes on then
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGALRM);
  sigprocmask(SIG_BLOCK, &set, 0);
  struct itimerval v = {.it_value = {0, 5000}, .it_interval = {0, 5000}}, none = {0};
  MUST(setitimer(ITIMER_REAL, &v, 0) == 0);
  nap(0.1);
  cut();
  struct timespec patience = {20, 0}, at_once = {0};
  for (int i = 0; i < 3; i++)
    EQUAL(sigtimedwait(&set, 0, &patience), SIGALRM);
  EQUAL(getitimer(ITIMER_REAL, &v), 0);
  EQUAL(v.it_interval.tv_usec, 5000);
  // What has expired once, and was not periodic, does not go on.
  EQUAL(setitimer(ITIMER_REAL, &none, 0), 0);
  while (sigtimedwait(&set, 0, &at_once) > 0)
    ;
  v = (struct itimerval){.it_value = {0, 5000}};
  EQUAL(setitimer(ITIMER_REAL, &v, 0), 0);
  EQUAL(sigtimedwait(&set, 0, &patience), SIGALRM);
  EQUAL(sigtimedwait(&set, 0, &at_once), -1);
}

static void pending_alarm_once(void) { // rings once, and not again
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGALRM);
  sigprocmask(SIG_BLOCK, &set, 0);
  struct itimerval v = {.it_value = {0, 5000}};
  MUST(setitimer(ITIMER_REAL, &v, 0) == 0);
  nap(0.1);
  cut();
  struct timespec at_once = {0}, a_while = {0, 50000000};
  EQUAL(sigtimedwait(&set, 0, &at_once), SIGALRM);
  EQUAL(sigtimedwait(&set, 0, &a_while), -1);
  EQUAL(getitimer(ITIMER_REAL, &v), 0);
  EQUAL(v.it_value.tv_sec * 1000000 + v.it_value.tv_usec, 0);
}

static void alarm_once(void) { // alarm(2) in half of which the cut comes; the time away does not count
  signal(SIGALRM, on_alarm);
  watch_the_clock();
  ready();
  double from = now();
  alarm(2);
  while (!alarms)
    nap(0.002);
  double took = now() - from - away;
  if (took < 1.6 || took > 2.7)
    say("rang after %.3f s", took);
  IN_TIME(took >= 1.6 && took <= 2.7); // on a busy machine, what counts as away may not have been
}

// --- POSIX timers. Ids are the kernel's, so system calls are made directly.

struct event { // struct sigevent, as the kernel has it
  void *value;
  int signal, notify, tid, rest[11];
};

static int make(clockid_t clock, int notify, int signal, long value, int tid) {
  struct event e = {.value = (void *)value, .signal = signal, .notify = notify, .tid = tid};
  int id = -1;
  MUST(syscall(SYS_timer_create, clock, &e, &id) == 0);
  return id;
}

static int ids[6];

static void posix_timers(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGRTMIN + 1);
  sigaddset(&set, SIGRTMIN + 2);
  sigprocmask(SIG_BLOCK, &set, 0);
  int gap[3];
  watch_the_clock();
  double from = now();
  gap[0] = make(CLOCK_MONOTONIC, SIGEV_NONE, 0, 0, 0);
  ids[0] = make(CLOCK_REALTIME, SIGEV_SIGNAL, SIGRTMIN + 1, 0x7777888899990000, 0);
  gap[1] = make(CLOCK_MONOTONIC, SIGEV_NONE, 0, 0, 0);
  gap[2] = make(CLOCK_MONOTONIC, SIGEV_NONE, 0, 0, 0);
  ids[1] = make(CLOCK_MONOTONIC, SIGEV_SIGNAL, SIGRTMIN + 2, 2, 0);
  ids[2] = make(CLOCK_BOOTTIME, SIGEV_NONE, 0, 3, 0);
  ids[3] = make(CLOCK_MONOTONIC, 4 /* SIGEV_THREAD_ID */, SIGRTMIN + 1, 4, getpid());
  ids[4] = make(CLOCK_PROCESS_CPUTIME_ID, SIGEV_NONE, 0, 5, 0);
  ids[5] = make(CLOCK_MONOTONIC, SIGEV_NONE, 0, 6, 0); // never armed
  for (int i = 0; i < 3; i++)
    MUST(syscall(SYS_timer_delete, gap[i]) == 0);
  for (int i = 0; i < 5; i++) {
    struct itimerspec s = every(1000 + i, 10 + i);
    MUST(syscall(SYS_timer_settime, ids[i], 0, &s, 0) == 0);
  }
  cut();
  for (int i = 0; i < 6; i++) {
    struct itimerspec s = {0};
    EQUAL(syscall(SYS_timer_gettime, ids[i], &s), 0);
    if (i < 5) {
      PLAUSIBLE(left(&s), 1000.0 + i, now() - from);
      EQUAL(s.it_interval.tv_sec, 10 + i);
    } else
      EQUAL(left(&s) * 1e9, 0);
  }
  for (int i = 0; i < 3; i++) {
    struct itimerspec s;
    int reused = 0;
    for (int j = 0; j < 6; j++)
      reused |= ids[j] == gap[i];
    if (!reused)
      EQUAL(syscall(SYS_timer_gettime, gap[i], &s), -1); // deleted stays deleted
  }
  // They tell whom and what they told before.
  struct itimerspec soon = every(0.02, 0);
  struct timespec patience = {2, 0};
  siginfo_t info;
  static const int signals[] = {1, 2, 0, 1};
  static const long values[] = {0x7777888899990000, 2, 0, 4};
  for (int i = 0; i < 4; i++)
    if (i != 2) {
      EQUAL(syscall(SYS_timer_settime, ids[i], 0, &soon, 0), 0);
      EQUAL(sigtimedwait(&set, &info, &patience), SIGRTMIN + signals[i]);
      EQUAL(info.si_code, SI_TIMER);
      EQUAL(info.si_timerid, ids[i]);
      EQUAL(info.si_value.sival_ptr, values[i]);
    }
  int fresh = make(CLOCK_MONOTONIC, SIGEV_NONE, 0, 0, 0);
  for (int i = 0; i < 6; i++)
    CHECK(fresh != ids[i]);
}

static void pending_timer(void) { // expired with its signal blocked: pending once, with its overruns
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGRTMIN + 1);
  sigprocmask(SIG_BLOCK, &set, 0);
  int id = make(CLOCK_MONOTONIC, SIGEV_SIGNAL, SIGRTMIN + 1, 9, 0);
  struct itimerspec s = every(0.005, 0.005);
  MUST(syscall(SYS_timer_settime, id, 0, &s, 0) == 0);
  nap(0.1);
  cut();
  siginfo_t info;
  struct timespec patience = {2, 0};
  EQUAL(sigtimedwait(&set, &info, &patience), SIGRTMIN + 1);
  EQUAL(info.si_value.sival_int, 9);
  EQUAL(info.si_code, SI_TIMER);
  EQUAL(info.si_timerid, id);
  if (syscall(SYS_timer_getoverrun, id) < 10)
    say("note: the overruns until the cut are not counted");
  EQUAL(sigtimedwait(&set, &info, &patience), SIGRTMIN + 1); // and it goes on
}

static int is_pending(int signal, int id, double patience) { // takes it
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  siginfo_t info;
  struct timespec most = timespec_of(patience);
  if (sigtimedwait(&set, &info, &most) < 0)
    return 0;
  EQUAL(info.si_code, SI_TIMER);
  EQUAL(info.si_timerid, id);
  return 1;
}

static void pending_timer_once(void) { // what a timer has sent is taken back when it is set anew, or deleted
  const int signal = SIGRTMIN + 1;
  int once[5];
  sigset_t set;
  sigemptyset(&set);
  for (int i = 0; i < 5; i++) {
    sigaddset(&set, signal + i);
    once[i] = make(CLOCK_MONOTONIC, SIGEV_SIGNAL, signal + i, i, 0);
  }
  sigprocmask(SIG_BLOCK, &set, 0);
  struct itimerspec soon = every(0.005, 0), far = every(1000, 0), never = {0};
  for (int i = 0; i < 5; i++)
    MUST(syscall(SYS_timer_settime, once[i], 0, &soon, 0) == 0);
  nap(0.1);
  MUST(syscall(SYS_timer_settime, once[4], 0, &never, 0) == 0);
  int stays = is_pending(signal + 4, once[4], 0); // before Linux 6.13
  cut();
  EQUAL(syscall(SYS_timer_delete, once[0]), 0);
  EQUAL(syscall(SYS_timer_settime, once[1], 0, &far, 0), 0);
  EQUAL(syscall(SYS_timer_settime, once[2], 0, &never, 0), 0);
  for (int i = 0; i < 3; i++)
    EQUAL(is_pending(signal + i, once[i], 0), stays);
  EQUAL(is_pending(signal + 3, once[3], 2), 1);
  EQUAL(is_pending(signal + 3, once[3], 0), 0);
}

static void pending_timer_goes_on(void) { // by the time at which it expired, whenever that is learned
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGRTMIN + 1);
  sigprocmask(SIG_BLOCK, &set, 0);
  watch_the_clock();
  int id = make(CLOCK_MONOTONIC, SIGEV_SIGNAL, SIGRTMIN + 1, 9, 0);
  struct itimerspec s = every(0.005, 1000);
  MUST(syscall(SYS_timer_settime, id, 0, &s, 0) == 0);
  nap(2);
  double from = now();
  MUST(syscall(SYS_timer_gettime, id, &s) == 0);
  double before = left(&s);
  cut();
  EQUAL(is_pending(SIGRTMIN + 1, id, 2), 1);
  EQUAL(syscall(SYS_timer_getoverrun, id), 0);
  EQUAL(syscall(SYS_timer_gettime, id, &s), 0);
  PLAUSIBLE(left(&s), before, now() - from);
  EQUAL(s.it_interval.tv_sec, 1000);
}

static volatile int notified;

static void notify(union sigval v) {
  __atomic_add_fetch(&notified, v.sival_int, __ATOMIC_SEQ_CST);
}

static void timer_threads(void) { // SIGEV_THREAD: the C library's helper thread takes part
  struct sigevent e = {.sigev_notify = SIGEV_THREAD, .sigev_value.sival_int = 1};
  e.sigev_notify_function = notify;
  timer_t t;
  MUST(timer_create(CLOCK_MONOTONIC, &e, &t) == 0);
  struct itimerspec s = every(0.02, 0.02);
  MUST(timer_settime(t, 0, &s, 0) == 0);
  for (int i = 0; i < 100 && !notified; i++)
    nap(0.1);
  MUST(notified > 0);
  cut();
  int seen = notified;
  for (int i = 0; i < 100 && notified <= seen + 4; i++)
    nap(0.1);
  CHECK(notified > seen + 4);
  EQUAL(timer_delete(t), 0);
}

// --- descriptors

static void timer_descriptors(void) {
  int idle = timerfd_create(CLOCK_REALTIME, TFD_NONBLOCK), far = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
  int past = timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK), beat = timerfd_create(CLOCK_MONOTONIC, 0);
  int absolute = timerfd_create(CLOCK_REALTIME, 0), once = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  MUST(idle >= 0 && far >= 0 && past >= 0 && beat >= 0 && absolute >= 0);
  watch_the_clock();
  double from = now();
  struct itimerspec s = every(1000, 7);
  MUST(timerfd_settime(far, 0, &s, 0) == 0);
  s = every(0.01, 0.01);
  MUST(timerfd_settime(past, 0, &s, 0) == 0 && timerfd_settime(beat, 0, &s, 0) == 0);
  s = every(0.01, 0);
  MUST(timerfd_settime(once, 0, &s, 0) == 0);
  s = (struct itimerspec){.it_value = timespec_of(seconds(CLOCK_REALTIME) + 1000)};
  MUST(timerfd_settime(absolute, TFD_TIMER_ABSTIME, &s, 0) == 0);
  nap(0.1);
  cut();
  uint64_t n = 0;
  EQUAL(read(idle, &n, 8), -1);
  EQUAL(errno, EAGAIN);
  EQUAL(timerfd_gettime(far, &s), 0);
  PLAUSIBLE(left(&s), 1000.0, now() - from);
  EQUAL(s.it_interval.tv_sec, 7);
  EQUAL(timerfd_gettime(absolute, &s), 0);
  double rest = left(&s);
  CHECK(rest > 500 && rest <= 1000 - (now() - from) + 0.5); // an absolute one does not wait for us
  EQUAL(read(past, &n, 8), 8);
  CHECK(n >= 9); // ticks that had not been read are still there
  EQUAL(read(once, &n, 8), 8);
  EQUAL(n, 1);
  EQUAL(read(once, &n, 8), -1);
  EQUAL(read(beat, &n, 8), 8);
  double t = now();
  for (int i = 0; i < 5; i++)
    EQUAL(read(beat, &n, 8), 8);
  IN_TIME(now() - t < 2);
}

SCENARIOS({"interval_timers", interval_timers}, {"interval_fires", interval_fires},
          {"pending_alarm", pending_alarm}, {"pending_alarm_once", pending_alarm_once}, {"alarm_once", alarm_once},
          {"posix_timers", posix_timers}, {"pending_timer", pending_timer},
          {"pending_timer_once", pending_timer_once}, {"pending_timer_goes_on", pending_timer_goes_on},
          {"timer_threads", timer_threads},
          {"timer_descriptors", timer_descriptors})
