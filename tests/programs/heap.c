// Threads that allocate, enlarge and free blocks of all sizes, which they know by what is in them.
#include "give_way.h"
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 4
#define BLOCKS 400

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long counts[THREADS], total;

static void wrong(const char *what) {
  printf("wrong: %s\n", what);
  fflush(stdout);
  _exit(3);
}

static uint64_t next(uint64_t *seed) {
  *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
  return *seed >> 33;
}

static void *churn(void *argument) {
  long me = (long)argument;
  uint64_t seed = me + 1;
  struct {
    unsigned char *at;
    size_t size;
  } blocks[BLOCKS] = {0};
  for (;;) {
    int i = next(&seed) % BLOCKS;
    size_t size = 1 + next(&seed) % (next(&seed) % 50 ? 3000 : 300000);
    for (size_t k = 0; k < blocks[i].size; k += 64)
      if (blocks[i].at[k] != (unsigned char)(i + me))
        wrong("a block");
    if (blocks[i].at && next(&seed) % 2) {
      free(blocks[i].at);
      blocks[i].at = 0;
      blocks[i].size = 0;
    }
    blocks[i].at = realloc(blocks[i].at, size);
    if (!blocks[i].at)
      wrong("no memory");
    blocks[i].size = size;
    memset(blocks[i].at, i + me, size);
    pthread_mutex_lock(&lock);
    counts[me]++;
    total++;
    int is_due = counts[me] % 1000 == 0;
    pthread_mutex_unlock(&lock);
    if (is_due)
      give_way(0.01);
  }
  return 0;
}

static void ignored(int signal) {
  (void)signal;
}

int main(void) {
  // (A static program that handles no signal has no code to return from one, and is refused.)
  signal(SIGUSR1, ignored);
  setvbuf(stdout, 0, _IOLBF, 0);
  for (long i = 0; i < THREADS; i++) {
    pthread_t thread;
    if (pthread_create(&thread, 0, churn, (void *)i))
      wrong("no thread");
  }
  for (;;) {
    usleep(20000);
    pthread_mutex_lock(&lock);
    unsigned long sum = 0;
    for (int i = 0; i < THREADS; i++)
      sum += counts[i];
    if (sum != total)
      wrong("the sum");
    pthread_mutex_unlock(&lock);
    printf("counted %lu\n", sum);
  }
}
