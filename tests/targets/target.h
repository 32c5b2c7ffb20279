// What all target programs share. A target is started as `PROGRAM SCENARIO DIRECTORY` with its standard output in
// DIRECTORY/out. It builds up some state, says "ready", waits until DIRECTORY/go exists, and then checks that all of
// the state is still there. It ends with "ok" and status 0, or with one line for each thing that differs, or is late, and status 1.
#ifndef TARGET_H
#define TARGET_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "../programs/give_way.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define COUNT(a) (sizeof(a) / sizeof *(a))
#define UNUSED __attribute__((unused))

static char directory[3072];
static char go_path[4096];
static int failures;

static UNUSED void say(const char *format, ...) {
  char line[4096];
  va_list args;
  va_start(args, format);
  int length = vsnprintf(line, sizeof line - 1, format, args);
  va_end(args);
  if (length > (int)sizeof line - 2)
    length = sizeof line - 2;
  line[length++] = '\n';
  if (write(1, line, length) != length)
    _exit(3);
}

// Set-up that must work; not what is being tested.
#define MUST(condition)                                                                                                \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      say("setup: %s:%d: %s: %s", __FILE__, __LINE__, #condition, strerror(errno));                                    \
      _exit(2);                                                                                                        \
    }                                                                                                                  \
  } while (0)

// What must hold after the cut.
#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      __atomic_add_fetch(&failures, 1, __ATOMIC_SEQ_CST);                                                              \
      if (failures < 40)                                                                                               \
        say("differs: %s:%d: %s (errno %d)", __FILE__, __LINE__, #condition, errno);                                   \
    }                                                                                                                  \
  } while (0)

#define EQUAL(actual, expected)                                                                                        \
  do {                                                                                                                 \
    long long got_ = (long long)(actual), want_ = (long long)(expected);                                               \
    if (got_ != want_) {                                                                                               \
      __atomic_add_fetch(&failures, 1, __ATOMIC_SEQ_CST);                                                              \
      if (failures < 40)                                                                                               \
        say("differs: %s:%d: %s is %lld (%#llx), expected %lld (%#llx), errno %d", __FILE__, __LINE__, #actual, got_,  \
            got_, want_, want_, errno);                                                                                \
    }                                                                                                                  \
  } while (0)

// What must hold after the cut unless the machine is busy: it is about time, and nothing differs.
#define IN_TIME(condition)                                                                                             \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      __atomic_add_fetch(&failures, 1, __ATOMIC_SEQ_CST);                                                              \
      say("late: %s:%d: %s", __FILE__, __LINE__, #condition);                                                          \
    }                                                                                                                  \
  } while (0)

#define SKIP(...)                                                                                                      \
  do {                                                                                                                 \
    say("skip: " __VA_ARGS__);                                                                                         \
    _exit(77);                                                                                                         \
  } while (0)

static UNUSED double seconds(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

static UNUSED double now(void) {
  return seconds(CLOCK_MONOTONIC);
}

static UNUSED struct timespec timespec_of(double s) {
  struct timespec t = {(time_t)s, (long)((s - (time_t)s) * 1e9)};
  return t;
}

static UNUSED void nap(double s) {
  struct timespec t = timespec_of(s);
  while (nanosleep(&t, &t) && errno == EINTR)
    ;
}

static UNUSED int gone(void) {
  return access(go_path, F_OK) == 0;
}

static UNUSED void wait_go(void) {
  while (!gone())
    nap(0.002);
}

static UNUSED void ready(void) {
  say("ready");
}

static UNUSED void cut(void) {
  ready();
  wait_go();
}

static UNUSED const char *path_of(const char *name) {
  static __thread char path[4096];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  return path;
}

static UNUSED uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

static UNUSED void fill(void *at, size_t bytes, uint64_t seed) {
  uint64_t *words = at;
  for (size_t i = 0; i < bytes / 8; i++)
    words[i] = mix(seed + i);
}

static UNUSED int filled(const void *at, size_t bytes, uint64_t seed) {
  const uint64_t *words = at;
  for (size_t i = 0; i < bytes / 8; i++)
    if (words[i] != mix(seed + i)) {
      say("word %zu of %zu at %p is %#llx, expected %#llx", i, bytes / 8, at, (long long)words[i],
          (long long)mix(seed + i));
      return 0;
    }
  return 1;
}

static UNUSED int all_zero(const void *at, size_t bytes) {
  const uint64_t *words = at;
  for (size_t i = 0; i < bytes / 8; i++)
    if (words[i])
      return 0;
  return 1;
}

static UNUSED void *map_anon(size_t bytes) {
  void *p = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  MUST(p != MAP_FAILED);
  return p;
}

static UNUSED pthread_t spawn(void *(*run)(void *), void *argument) {
  pthread_t t;
  MUST((errno = pthread_create(&t, 0, run, argument)) == 0);
  return t;
}

// Contents of a small file, e.g. of procfs, in a buffer to be freed.
static UNUSED char *contents(const char *path, size_t *length) {
  size_t room = 1 << 16, used = 0;
  char *buffer = malloc(room + 1);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    snprintf(buffer, room, "%s: %s", path, strerror(errno));
    if (length)
      *length = strlen(buffer);
    return buffer;
  }
  for (;;) {
    if (used == room)
      buffer = realloc(buffer, (room *= 2) + 1);
    ssize_t n = read(fd, buffer + used, room - used);
    if (n <= 0)
      break;
    used += n;
  }
  close(fd);
  buffer[used] = 0;
  if (length)
    *length = used;
  return buffer;
}

// Watches the clocks from a thread of its own: time during which the whole program did not run, by the monotonic clock
// (which may stand still while the program is away) and by the time of day (which does not).
static volatile double away, resumed_at, resumed_at_time_of_day;
static volatile int started_watching;

static UNUSED void *watch(void *unused) {
  (void)unused;
  // A thread that waits for a processor is not away. Of the usual kind it may wait longer than a cut takes, where others compute.
  struct sched_param first = {.sched_priority = 1};
  pthread_setschedparam(pthread_self(), SCHED_FIFO, &first); // if that is permitted
  double last = now(), last_time_of_day = seconds(CLOCK_REALTIME);
  resumed_at = last;
  resumed_at_time_of_day = last_time_of_day;
  for (;;) {
    started_watching = 1;
    nap(0.001);
    double t = now(), time_of_day = seconds(CLOCK_REALTIME);
    if (t - last > 0.04) {
      away += t - last - 0.001;
      resumed_at = t;
    }
    if (time_of_day - last_time_of_day > 0.04)
      resumed_at_time_of_day = time_of_day;
    last = t;
    last_time_of_day = time_of_day;
  }
  return 0;
}

static UNUSED void watch_the_clock(void) {
  spawn(watch, 0);
  while (!started_watching)
    nap(0.001);
}

struct scenario {
  const char *name;
  void (*run)(void);
};

#define SCENARIOS(...)                                                                                                 \
  int main(int argc, char **argv) {                                                                                    \
    static const struct scenario scenarios[] = {__VA_ARGS__};                                                          \
    if (argc < 3) {                                                                                                    \
      for (size_t i = 0; i < COUNT(scenarios); i++)                                                                    \
        say("%s", scenarios[i].name);                                                                                  \
      return argc == 1 ? 0 : 2;                                                                                        \
    }                                                                                                                  \
    snprintf(directory, sizeof directory, "%s", argv[2]);                                                              \
    snprintf(go_path, sizeof go_path, "%s/go", argv[2]);                                                               \
    for (size_t i = 0; i < COUNT(scenarios); i++)                                                                      \
      if (!strcmp(scenarios[i].name, argv[1])) {                                                                       \
        scenarios[i].run();                                                                                            \
        if (!failures)                                                                                                 \
          say("ok");                                                                                                   \
        _exit(failures ? 1 : 0);                                                                                       \
      }                                                                                                                \
    say("setup: no scenario %s", argv[1]);                                                                             \
    return 2;                                                                                                          \
  }
#endif
