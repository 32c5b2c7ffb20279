// A computation in rounds: `PROGRAM DIRECTORY SIZE ROUNDS THREADS [watch]`. With no rounds (0) it goes on until it is
// told to stop. `watch` adds a thread that wakes every 100 µs and keeps the longest time by which it was late.
#ifndef WORKLOAD_H
#define WORKLOAD_H
#include "program.h"

static size_t size;
static long rounds, rounds_done;
static int threads;
static bool watched;
static struct gaps lateness;
static uint64_t began;
static pthread_t controller;

static inline void *control(void *unused) {
  enum { WATCH = 100000, LOOK = 5000000 };
  (void)unused;
  uint64_t looked = 0, last = now();
  while (!atomic_load(&stopped)) {
    pause_for(watched ? WATCH : LOOK);
    uint64_t time = now();
    if (watched && time - last > WATCH)
      note_gap(&lateness, time - last - WATCH);
    if (time - looked > LOOK) {
      looked = time;
      if (asked())
        answer_gaps(&lateness);
      if (exists("stop"))
        atomic_store(&stopped, true);
      time = now();
    }
    last = time;
  }
  return NULL;
}

static inline void begin(int count, char **arguments) {
  if (count < 5) {
    fprintf(stderr, "%s DIRECTORY SIZE ROUNDS THREADS [watch]\n", arguments[0]);
    exit(2);
  }
  directory = arguments[1];
  size = strtoul(arguments[2], NULL, 10);
  rounds = strtol(arguments[3], NULL, 10);
  threads = atoi(arguments[4]);
  watched = count > 5;
  if (threads < 1 || threads > MOST_THREADS || size == 0) {
    fprintf(stderr, "%s: out of range\n", arguments[0]);
    exit(2);
  }
}

// The data is set up: the clock starts.
static inline void ready(void) {
  if (pthread_create(&controller, NULL, control, NULL))
    die("pthread_create");
  began = now();
  tell("ready", "%d\n", getpid());
}

static inline bool another_round(void) {
  return !atomic_load(&stopped) && (rounds == 0 || rounds_done < rounds);
}

// The end: what was computed, and whether the program's own check is satisfied.
static inline int finish(uint64_t sum, bool intact) {
  double seconds = (double)(now() - began) / 1e9;
  atomic_store(&stopped, true);
  pthread_join(controller, NULL);
  tell("result", "digest %016llx\nseconds %.6f\nrounds %ld\nverdict %s\n", (unsigned long long)sum, seconds,
       rounds_done, intact ? "intact" : "wrong");
  return intact ? 0 : 1;
}
#endif
