// What the programs of the benchmark share.
//
// A program works in its own directory and is spoken to by files in it, so that it can be reached the same way when it
// was restored, or started by another tool:
//
//   ready    appears when its data is set up and the work begins
//   ask      makes it write `answer`: what it has measured since the last time, and forget it
//   stop     makes it end before its rounds are done
//   result   appears at the end: key and value on each line, `verdict intact` if its own check is satisfied
#ifndef PROGRAM_H
#define PROGRAM_H
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 256 };

static const char *directory;
static atomic_bool stopped;

static inline void die(const char *what) {
  perror(what);
  exit(1);
}

// Nanoseconds of the monotonic clock.
static inline uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static inline void pause_for(uint64_t nanoseconds) {
  struct timespec t = {(time_t)(nanoseconds / 1000000000), (long)(nanoseconds % 1000000000)};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

// A number for each number, the same in every run.
static inline uint64_t mix(uint64_t x) {
  x = (x + 1) * 0x9e3779b97f4a7c15u;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 32);
}

static inline uint64_t digest(const void *data, size_t bytes) {
  uint64_t sum = 14695981039346656037u, word;
  const char *at = data;
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    memcpy(&word, at + i, 8);
    sum = (sum ^ word) * 1099511628211u;
    sum ^= sum >> 31;
  }
  return sum;
}

// Zeroed memory.
static inline void *memory(size_t bytes) {
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED)
    die("mmap");
  return at;
}

static inline const char *path(const char *name, char *buffer, size_t size) {
  snprintf(buffer, size, "%s/%s", directory, name);
  return buffer;
}

static inline bool exists(const char *name) {
  char at[4096];
  return access(path(name, at, sizeof at), F_OK) == 0;
}

// The file NAME appears complete.
__attribute__((format(printf, 2, 3))) static inline void tell(const char *name, const char *format, ...) {
  char whole[4096], part[4096 + 8];
  path(name, whole, sizeof whole);
  snprintf(part, sizeof part, "%s.part", whole);
  FILE *file = fopen(part, "w");
  if (!file)
    die(part);
  va_list list;
  va_start(list, format);
  vfprintf(file, format, list);
  va_end(list);
  if (fclose(file) || rename(part, whole))
    die(whole);
}

// Whether somebody asks; each question is heard once.
static inline bool asked(void) {
  char at[4096];
  return exists("ask") && unlink(path("ask", at, sizeof at)) == 0;
}

// Gaps in the time of one thread. `longest` is what it saw; `stopped` leaves out what it spent waiting for a processor
// (from schedstat), which is what a program feels that does not share its processors with the tool.
struct gaps {
  atomic_uint_least64_t longest, stopped;
  uint64_t waited;
};

// Nanoseconds for which this thread was ready to run and did not.
static inline uint64_t time_waiting(void) {
  unsigned long long ran = 0, waited = 0;
  FILE *file = fopen("/proc/thread-self/schedstat", "r");
  if (file) {
    if (fscanf(file, "%llu %llu", &ran, &waited) != 2)
      waited = 0;
    fclose(file);
  }
  return waited;
}

static inline void keep_largest(atomic_uint_least64_t *most, uint64_t value) {
  uint64_t before = atomic_load(most);
  while (value > before && !atomic_compare_exchange_weak(most, &before, value))
    ;
}

// Nanoseconds; a shorter gap is taken as it is.
enum { WORTH_A_LOOK = 30000 };

static inline void note_gap(struct gaps *gaps, uint64_t gap) {
  keep_largest(&gaps->longest, gap);
  if (gap < WORTH_A_LOOK) {
    keep_largest(&gaps->stopped, gap);
    return;
  }
  uint64_t waited = time_waiting(), wait = waited - gaps->waited;
  gaps->waited = waited;
  keep_largest(&gaps->stopped, gap > wait ? gap - wait : 0);
}

// `longest stopped`, nanoseconds, since the last time.
static inline void answer_gaps(struct gaps *gaps) {
  uint64_t longest = atomic_exchange(&gaps->longest, 0), in_it = atomic_exchange(&gaps->stopped, 0);
  tell("answer", "%llu %llu\n", (unsigned long long)longest, (unsigned long long)in_it);
}

// One part of work that is split among threads.
struct part {
  void (*work)(int index, int of);
  int index, of;
};

static inline void *run_part(void *argument) {
  struct part *part = argument;
  part->work(part->index, part->of);
  return NULL;
}

// Work split among threads; returns when all parts are done.
static inline void in_parallel(int threads, void (*work)(int index, int of)) {
  pthread_t thread[MOST_THREADS];
  struct part part[MOST_THREADS];
  for (int i = 0; i < threads; i++) {
    part[i] = (struct part){work, i, threads};
    if (i > 0 && pthread_create(&thread[i], NULL, run_part, &part[i]))
      die("pthread_create");
  }
  work(0, threads);
  for (int i = 1; i < threads; i++)
    pthread_join(thread[i], NULL);
}

// The range of `all` things that is part `index` of `of`.
static inline size_t first_of(size_t all, int index, int of) { return all * (size_t)index / (size_t)of; }
#endif
