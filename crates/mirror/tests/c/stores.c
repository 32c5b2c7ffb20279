/* Every kind of store: sizes, structures, bit fields, vectors, copies, libc's writers, atomics, threads, a signal handler. */
#include "stillpoint_mirror.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct part { char c; short s; int i; long l; float f; double d; unsigned bits : 5, more : 11; char text[40]; };
struct part global, other;
static long table[5000];
static char *heap;
static struct part *parts;
static long *numbers;
static _Atomic long counter;
static _Atomic unsigned char small;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long guarded[8];
static volatile sig_atomic_t ticks;
static long handled[64];

static int ascending(const void *a, const void *b) { return *(const long *)a < *(const long *)b ? -1 : 1; }

static void tick(int signal) {
  (void)signal;
  ticks++;
  handled[ticks % 64] = ticks;
}

static void stores(unsigned round) {
  struct part made = {'x', 1, (int)round, 3, 1.5f, 2.5, 7, 99, "made"};
  made.l = round;
  parts[round % 100] = made;
  parts[(round + 1) % 100] = parts[round % 100];
  global = parts[round % 100];
  other.bits = round;
  other.more += 3;
  for (int i = 0; i < 5000; i++)
    table[i] = table[i] * 3 + i + round;
  for (int i = 0; i < 3000; i++)
    numbers[i] = (long)(i * 7919u * (round + 1) % 10007);
  qsort(numbers, 3000, sizeof *numbers, ascending);
  memset(heap + round % 512, (int)round, 70000);
  memmove(heap + 100, heap + 50 + round % 100, 50000);
  memcpy(heap + 60000, table, 9000);
  snprintf(heap + 90000, 100, "round %u of some", round);
  strcpy(heap + 91000, "a string");
  strcat(heap + 91000, heap + 90000);
  sprintf(global.text, "%u", round);
  gettimeofday((struct timeval *)(void *)(heap + 92000), NULL);
  clock_gettime(CLOCK_MONOTONIC, (struct timespec *)(void *)(heap + 92032));
  int ends[2];
  if (pipe(ends) == 0) {
    if (write(ends[1], "through a pipe", 14) != 14 || read(ends[0], heap + 93000, 14) != 14)
      abort();
    close(ends[0]);
    close(ends[1]);
  }
  char *grown = strdup("grows");
  for (size_t n = 100; n < 100000; n *= 3) {
    grown = realloc(grown, n);
    grown[n - 1] = 'e';
  }
  free(grown);
  unsigned char *zeros = calloc(1000, 7);
  zeros[round % 7000] = 1;
  free(zeros);
}

static void *worker(void *argument) {
  long me = (long)argument;
  for (unsigned i = 0; i < 30000; i++) {
    atomic_fetch_add(&counter, 1);
    long was = atomic_load(&counter);
    atomic_compare_exchange_strong(&counter, &was, was + 2);
    atomic_fetch_or(&small, (unsigned char)(1u << (i % 8)));
    atomic_store(&small, (unsigned char)i);
    pthread_mutex_lock(&lock);
    guarded[me]++;
    guarded[7] += me;
    pthread_mutex_unlock(&lock);
  }
  return NULL;
}

int main(void) {
  heap = malloc(100 << 10);
  parts = calloc(100, sizeof *parts);
  numbers = malloc(3000 * sizeof *numbers);
  signal(SIGALRM, tick);
  struct itimerval often = {{0, 300}, {0, 300}};
  setitimer(ITIMER_REAL, &often, NULL);
  stillpoint_mirror_every(1);
  pthread_t threads[3];
  for (long i = 0; i < 3; i++)
    pthread_create(&threads[i], NULL, worker, (void *)(i + 1));
  struct stillpoint_mirror_stats stats;
  unsigned round = 0;
  do {
    stores(round++);
    stillpoint_mirror_stats(&stats);
  } while (round < 150 || (stats.complete < 20 && round < 100000));
  for (int i = 0; i < 3; i++)
    pthread_join(threads[i], NULL);
  struct itimerval never = {{0, 0}, {0, 0}};
  setitimer(ITIMER_REAL, &never, NULL);
  stillpoint_mirror_every(0);
  int64_t number;
  while ((number = stillpoint_mirror_checkpoint()) < 0)
    usleep(100);
  if (stillpoint_mirror_wait(number) != 0)
    return 3;
  do
    stillpoint_mirror_stats(&stats);
  while (stats.phase != STILLPOINT_MIRROR_ATTACHED);
  /* The lock's own words are libc's business; it is open now, as it was in the beginning. */
  uint64_t stale = stillpoint_mirror_differing();
  if (stale || stats.complete < 20)
    fprintf(stderr, "%lu complete, %d ticks, %ld\n", (unsigned long)stats.complete, (int)ticks, guarded[7]);
  if (guarded[1] != 30000 || guarded[7] != 180000 || stats.complete < 20 || ticks == 0)
    return 4;
  if (stale)
    printf("%lu stale bytes\n", (unsigned long)stale);
  else
    printf("no stale bytes\n");
  return 0;
}
