// The program of Carothers & Szymanski (2002): threads change a part of a vector, meet, and the vector is saved, round after round:
// by copying it, by a snapshot of the program, or not at all.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <stillpoint.h>

#define PAGE 4096L

static char *vector, *copy;
static long bytes, changed, threads, rounds;
static enum { COPY, SNAPSHOT, NOTHING } how;
static pthread_barrier_t begins, ends;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

// Each thread has a part of the vector of its own, and changes a run of it that lies elsewhere each time.
static void change(long me, long round) {
  long part = bytes / threads / PAGE * PAGE, run = changed / threads < part ? changed / threads : part;
  uint64_t mixed = (uint64_t)(round * threads + me + 1) * 0x9e3779b97f4a7c15u;
  long at = part > run ? (long)((mixed >> 20) % (uint64_t)((part - run) / PAGE + 1)) * PAGE : 0;
  for (long i = 0; i < run; i += 8)
    *(uint64_t *)(vector + me * part + at + i) += 1;
}

static void *work(void *which) {
  for (long round = 0; round < rounds; round++) {
    pthread_barrier_wait(&begins);
    change((long)which, round);
    pthread_barrier_wait(&ends);
  }
  return 0;
}

static void must(int code, const char *what) {
  if (code) {
    fprintf(stderr, "%s: %s\n", what, sp_strerror(code));
    exit(1);
  }
}

static uint64_t last;
static void save(void) {
  uint64_t next;
  switch (how) {
  case COPY:
    memcpy(copy, vector, (size_t)bytes);
    __asm__ volatile("" ::"r"(copy) : "memory");
    break;
  case SNAPSHOT:
    must(sp_snapshot(&next), "snapshot");
    if (last)
      must(sp_commit(last), "commit");
    last = next;
    break;
  case NOTHING:
    break;
  }
}

// What the first write to a page costs after a snapshot, above what any write does.
static void first_writes(void) {
  long pages = bytes / PAGE;
  double times[3];
  for (int turn = 0; turn < 3; turn++) {
    if (turn < 2)
      save();
    double began = now();
    for (long i = 0; i < pages; i++)
      (*(volatile char *)(vector + i * PAGE))++;
    times[turn] = (now() - began) * 1e3 / pages;
  }
  printf("write_after_first %.4f\nwrite_after_next %.4f\n", times[0] - times[2], times[1] - times[2]);
}

int main(int argc, char **argv) {
  if (argc < 6)
    return 2;
  how = !strcmp(argv[1], "copy") ? COPY : !strcmp(argv[1], "none") ? NOTHING : SNAPSHOT;
  bytes = atol(argv[2]), threads = atol(argv[3]), changed = atol(argv[4]), rounds = atol(argv[5]);
  vector = malloc((size_t)bytes + PAGE);
  vector += PAGE - (long)vector % PAGE;
  memset(vector, 1, (size_t)bytes);
  if (how == COPY) {
    copy = malloc((size_t)bytes);
    memset(copy, 2, (size_t)bytes);
  }
  if (!strcmp(argv[1], "writes")) {
    first_writes();
    return 0;
  }
  pthread_barrier_init(&begins, 0, (unsigned)threads);
  pthread_barrier_init(&ends, 0, (unsigned)threads);
  pthread_t others[64];
  for (long i = 1; i < threads && i < 64; i++)
    pthread_create(&others[i], 0, work, (void *)i);
  double start = now();
  for (long round = 0; round < rounds; round++) {
    pthread_barrier_wait(&begins);
    change(0, round);
    pthread_barrier_wait(&ends);
    double began = now();
    save();
    printf("save %.4f\n", now() - began);
  }
  printf("whole %.4f\n", now() - start);
  for (long i = 1; i < threads && i < 64; i++)
    pthread_join(others[i], 0);
  return 0;
}
