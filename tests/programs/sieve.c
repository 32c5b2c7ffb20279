// Threads that sieve primes block by block; the main thread writes a line for each block, in order.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 200000
#define THREADS 3

static int blocks, next_block;
static long *counts;
static char *done;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;

static long sieve(long from) {
  char *composite = calloc(BLOCK, 1);
  long n = 0;
  for (long p = 2; p * p < from + BLOCK; p++) {
    long m = (from + p - 1) / p * p;
    if (m < p * p)
      m = p * p;
    for (; m < from + BLOCK; m += p)
      composite[m - from] = 1;
  }
  for (long i = 0; i < BLOCK; i++)
    n += !composite[i] && from + i >= 2;
  free(composite);
  return n;
}

static void *work(void *unused) {
  for (;;) {
    pthread_mutex_lock(&lock);
    int b = next_block++;
    pthread_mutex_unlock(&lock);
    if (b >= blocks)
      return unused;
    long n = sieve((long)b * BLOCK);
    pthread_mutex_lock(&lock);
    counts[b] = n;
    done[b] = 1;
    pthread_cond_broadcast(&finished);
    pthread_mutex_unlock(&lock);
  }
}

int main(int argc, char **argv) {
  blocks = argc > 1 ? atoi(argv[1]) : 100;
  counts = calloc(blocks, sizeof *counts);
  done = calloc(blocks, 1);
  FILE *out = fopen("counts", "w");
  pthread_t t[THREADS];
  for (int i = 0; i < THREADS; i++)
    pthread_create(&t[i], 0, work, 0);
  long total = 0;
  for (int b = 0; b < blocks; b++) {
    pthread_mutex_lock(&lock);
    while (!done[b])
      pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
    total += counts[b];
    fprintf(out, "%d %ld %ld\n", b, counts[b], total);
    fflush(out);
  }
  for (int i = 0; i < THREADS; i++)
    pthread_join(t[i], 0);
  printf("done %ld\n", total);
  return 0;
}
