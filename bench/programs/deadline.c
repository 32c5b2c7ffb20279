// deadline DIRECTORY MEBIBYTES COST_US PERIOD_US: a periodic real-time task.
//
// Every period begins a job that computes for about COST_US, writing pages of one stretch of the memory, the next job those
// of the next one; it must be done when the next one is due. The answer: `jobs missed lateness response`: jobs since the last time, those that ended after their
// deadline, by how much at most, and the longest time from when a job was due to its end (nanoseconds). The task has a
// real-time priority where that is allowed.
#include "program.h"
#include <sched.h>

enum { WORDS = 512, STRETCHES = 64 };
static uint64_t *words;
static size_t pages;
static uint64_t cost, period;
// Words written so far, how many of them in calibration, and how many in each job.
static uint64_t position, calibrated, steps;
static atomic_uint_least64_t jobs, missed, lateness, response;
static bool real_time;

// The word that is written at a position.
static uint64_t *word(uint64_t at) {
  uint64_t stretch = steps ? (at - calibrated) / steps % STRETCHES : 0, length = pages / STRETCHES;
  uint64_t page = stretch * length + (at * 0x9e3779b97f4a7c15u >> 20) % length;
  return &words[page * WORDS + at % WORDS];
}

static void compute(uint64_t count) {
  for (uint64_t i = 0; i < count; i++, position++)
    *word(position) += mix(position);
}

// How many steps take `cost`; the fastest of some trials, so that a disturbed one does not count.
static void calibrate(void) {
  enum { TRIAL = 20000 };
  uint64_t best = UINT64_MAX;
  for (int i = 0; i < 20; i++) {
    uint64_t start = now();
    compute(TRIAL);
    uint64_t took = now() - start;
    best = took < best ? took : best;
  }
  calibrated = position;
  steps = cost * TRIAL / (best ? best : 1) + 1;
}

// All writes are taken back: then the memory must be as it was.
static bool right(void) {
  while (position > calibrated) {
    position--;
    *word(position) -= mix(position);
  }
  steps = 0;
  while (position-- > 0)
    *word(position) -= mix(position);
  bool equal = true;
  for (size_t i = 0; i < pages * WORDS; i++)
    equal = equal && words[i] == mix(i);
  return equal;
}

static void *run_jobs(void *unused) {
  (void)unused;
  struct sched_param priority = {.sched_priority = 1};
  real_time = pthread_setschedparam(pthread_self(), SCHED_FIFO, &priority) == 0;
  uint64_t due = now() + period;
  while (!atomic_load(&stopped)) {
    struct timespec at = {(time_t)(due / 1000000000), (long)(due % 1000000000)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
    compute(steps);
    uint64_t took = now() - due;
    atomic_fetch_add(&jobs, 1);
    keep_largest(&response, took);
    if (took > period) {
      // Jobs whose whole period passed meanwhile were never started: they are missed, too.
      atomic_fetch_add(&missed, took / period);
      keep_largest(&lateness, took - period);
    }
    due += period * (took / period + 1);
  }
  return NULL;
}

int main(int count, char **arguments) {
  if (count < 5) {
    fprintf(stderr, "%s DIRECTORY MEBIBYTES COST_US PERIOD_US\n", arguments[0]);
    return 2;
  }
  directory = arguments[1];
  pages = strtoul(arguments[2], NULL, 10) << 8;
  cost = strtoull(arguments[3], NULL, 10) * 1000;
  period = strtoull(arguments[4], NULL, 10) * 1000;
  if (pages < STRETCHES || period == 0)
    return 2;
  words = memory(pages * WORDS * sizeof *words);
  for (size_t i = 0; i < pages * WORDS; i++)
    words[i] = mix(i);
  calibrate();
  pthread_t task;
  if (pthread_create(&task, NULL, run_jobs, NULL))
    die("pthread_create");
  tell("ready", "%d\n", getpid());
  while (!exists("stop")) {
    if (asked())
      tell("answer", "%llu %llu %llu %llu\n", (unsigned long long)atomic_exchange(&jobs, 0),
           (unsigned long long)atomic_exchange(&missed, 0), (unsigned long long)atomic_exchange(&lateness, 0),
           (unsigned long long)atomic_exchange(&response, 0));
    pause_for(2000000);
  }
  atomic_store(&stopped, true);
  pthread_join(task, NULL);
  bool intact = right();
  tell("result", "priority %s\nverdict %s\n", real_time ? "real-time" : "ordinary", intact ? "intact" : "wrong");
  return intact ? 0 : 1;
}
