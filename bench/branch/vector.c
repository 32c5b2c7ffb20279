// A vector of 64 MiB and threads that write to it, as in Carothers & Szymanski, "Checkpointing Multithreaded Programs" (Dr. Dobb's
// Journal, 2002): a copy of it by hand, the first snapshot of the program, further ones with a little changed between, and rollbacks.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <stillpoint.h>

#define BYTES (64L << 20)
#define PAGE 4096L
#define RUNS 60

static char *vector;
static volatile long spins[16];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static void *others(void *which) {
  for (;;) {
    spins[(long)which]++;
    usleep(1000);
  }
}

static void change(int pages) {
  for (int i = 0; i < pages; i++)
    vector[rand() % (BYTES / PAGE) * PAGE]++;
}

static void failed(const char *what, int code) {
  fprintf(stderr, "%s: %s\n", what, sp_strerror(code));
  exit(1);
}

int main(int argc, char **argv) {
  int threads = argc > 1 ? atoi(argv[1]) : 2, pages = argc > 2 ? atoi(argv[2]) : 16, back = argc > 3 ? atoi(argv[3]) : 100;
  vector = malloc(BYTES);
  char *copy = malloc(BYTES);
  memset(vector, 1, BYTES);
  memset(copy, 2, BYTES);
  for (long i = 1; i < threads; i++) {
    pthread_t t;
    pthread_create(&t, 0, others, (void *)i);
  }
  for (int i = 0; i < 5; i++) {
    double began = now();
    memcpy(copy, vector, BYTES);
    __asm__ volatile("" ::"r"(copy) : "memory");
    printf("copy %.4f\n", now() - began);
  }
  uint64_t last;
  double began = now();
  int came = sp_snapshot(&last);
  if (came)
    failed("snapshot", came);
  printf("first %.4f\n", now() - began);
  for (int i = 0; i < RUNS; i++) {
    uint64_t next;
    change(pages);
    began = now();
    if ((came = sp_snapshot(&next)))
      failed("snapshot", came);
    printf("again %.4f\n", now() - began);
    if ((came = sp_commit(last)))
      failed("commit", came);
    last = next;
  }
  fflush(stdout);
  // What a rollback costs shows in what is not rolled back: the clock.
  static volatile double times[RUNS];
  int pipe_of_times[2];
  if (pipe(pipe_of_times))
    return 1;
  double start = now();
  came = sp_snapshot(&last);
  if (came < 0)
    failed("snapshot", came);
  if (came < RUNS) {
    change(back);
    sp_rollback(last, came + 1);
    return 1;
  }
  times[0] = (now() - start) / RUNS;
  printf("back %.4f\n", times[0]);
  return 0;
}
