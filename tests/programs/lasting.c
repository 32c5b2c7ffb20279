// A program with threads that makes a twin of itself, and checkpoints of itself: it says in files where it has come to.
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <stillpoint.h>

#define MUST(x) \
  do \
    if (!(x)) { \
      fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); \
      _exit(1); \
    } \
  while (0)

#define WORKERS 3

static volatile long counted[WORKERS], over;
static pthread_t workers[WORKERS];
static char filled[1 << 20];

static void *work(void *which) {
  static __thread long mine;
  while (!over) {
    counted[(long)which]++;
    mine++;
    usleep(50);
  }
  return (void *)mine;
}

// All threads go on, and what they have counted is what they know of.
static void all_is_there(void) {
  long before[WORKERS];
  memcpy(before, (void *)counted, sizeof before);
  for (int i = 0; i < WORKERS; i++)
    while (counted[i] == before[i])
      usleep(100);
  for (size_t i = 0; i < sizeof filled; i++)
    MUST(filled[i] == (char)(i / 1000));
}

static void done(const char *name) {
  FILE *f = fopen(name, "w");
  MUST(f && fclose(f) == 0);
}

static void ends(const char *name) {
  over = 1;
  for (int i = 0; i < WORKERS; i++) {
    void *own;
    MUST(!pthread_join(workers[i], &own) && (long)own == counted[i]);
  }
  done(name);
  _exit(0);
}

int main(void) {
  for (size_t i = 0; i < sizeof filled; i++)
    filled[i] = (char)(i / 1000);
  for (long i = 0; i < WORKERS; i++)
    MUST(!pthread_create(&workers[i], 0, work, (void *)i));
  uint64_t here;
  MUST(sp_snapshot(&here) == 0);
  MUST(sp_checkpoint("no/name") == SP_EINVAL && strstr(sp_strerror(SP_EINVAL), "no/name"));
  int own = getpid(), twin = sp_fork_all();
  if (twin < 0)
    fprintf(stderr, "twin: %s\n", sp_strerror(twin));
  MUST(twin >= 0 && getpid() == own);
  all_is_there();
  if (twin == 0) {
    MUST(sp_rollback(here, 1) == SP_ENOENT); // that one stays the program's
    ends("twin");
  }
  MUST(twin != own);
  int came = sp_checkpoint("lasting");
  if (came < 0)
    fprintf(stderr, "checkpoint: %s\n", sp_strerror(came));
  MUST(came >= 0);
  all_is_there();
  if (came == 1) {
    uint64_t again;
    int value = sp_snapshot(&again);
    MUST(value >= 0);
    if (value == 0)
      sp_rollback(again, 5);
    MUST(value == 5);
    ends("restored");
  }
  done("checkpointed");
  for (;;)
    pause();
}
