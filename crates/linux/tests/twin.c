// A program that must not notice that it is forked. Threads write memory in a fixed order, so that each instant of it
// can be told from a mixture of two; the main thread asks for children that it does not have.
//
// twin MEBIBYTES [limited|ignoring|watchful]
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WRITERS = 2, PAGES = 64, WORDS = 512 };

// What the other side reads: at the address that the first line of output tells.
struct report {
  volatile uint64_t rounds[WRITERS];
  volatile uint64_t looks;
  volatile uint64_t wrong;
  volatile uint64_t signals;
};

static struct report *report;
static uint64_t *regions[WRITERS];

static void on_signal(int signal) {
  (void)signal;
  report->signals++;
}

// Page after page gets the number of the round; the pages behind still have the one before.
static void *writer(void *arg) {
  uintptr_t me = (uintptr_t)arg;
  uint64_t *region = regions[me];
  for (uint64_t round = 1;; round++) {
    for (int page = 0; page < PAGES; page++) {
      volatile uint64_t *word = &region[page * WORDS];
      if (*word != round - 1) {
        report->wrong++;
      }
      *word = round;
    }
    report->rounds[me] = round;
  }
}

static void *map(size_t len, int flags) {
  void *at = mmap(0, len, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | flags, -1, 0);
  if (at == MAP_FAILED) {
    perror("mmap");
    exit(2);
  }
  return at;
}

int main(int argc, char **argv) {
  size_t filler_len = (size_t)atoi(argv[1]) << 20;
  report = map(4096, MAP_SHARED);
  unsigned char *filler = map(filler_len, MAP_PRIVATE);
  for (size_t i = 0; i < filler_len; i += 4096) {
    memcpy(filler + i, &i, sizeof i);
  }
  for (int i = 0; i < WRITERS; i++) {
    regions[i] = map(PAGES * 4096, MAP_PRIVATE);
  }
  const char *kind = argc > 2 ? argv[2] : "";
  int ignoring = !strcmp(kind, "ignoring");
  // A watchful one looks for children of any kind, also while we are at work.
  int options = strcmp(kind, "watchful") ? 0 : __WALL;
  struct sigaction action = {.sa_handler = ignoring ? SIG_IGN : on_signal, .sa_flags = SA_RESTART};
  sigaction(SIGCHLD, &action, 0);
  for (uintptr_t i = 0; i < WRITERS; i++) {
    pthread_t thread;
    pthread_create(&thread, 0, writer, (void *)i);
  }
  if (!strcmp(kind, "limited")) {
    struct rlimit one = {1, 1};
    setrlimit(RLIMIT_NPROC, &one);
    if (setuid(54321)) {
      perror("setuid");
      exit(2);
    }
  }
  printf("%p %p %zu %p %p\n", (void *)report, (void *)filler, filler_len, (void *)regions[0], (void *)regions[1]);
  fflush(stdout);
  for (;;) {
    int status;
    if (waitpid(-1, &status, options) != -1 || errno != ECHILD) {
      report->wrong++;
    }
    report->looks++;
  }
}
