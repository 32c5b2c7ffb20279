// A program of several processes that talk over pipes, pairs of sockets, an eventfd and shared memory, and check all the time that each
// knows of the others what they know of themselves. It says so in lines, and in a line what is wrong.
//
// `workers`: nothing more. `workers adopts`: orphans come to it. At SIGUSR1 it makes a child that stays, and has all that it has.
#define _GNU_SOURCE
#include "give_way.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(x)                                                                 \
  do                                                                            \
    if (!(x)) {                                                                 \
      dprintf(1, "wrong: %s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); \
      _exit(1);                                                                 \
    }                                                                           \
  while (0)

#define WORKERS 4
#define AHEAD 5

static struct {
  // What each worker has answered, and was asked for.
  volatile uint64_t answered[WORKERS], asked[WORKERS];
  pthread_mutex_t lock;
  volatile uint64_t left, right;
} *shared;

static int to[WORKERS][2], from[WORKERS][2], answers;
static volatile sig_atomic_t wanted;

static void want(int signal) {
  (void)signal;
  wanted = 1;
}

static void both(void) {
  MUST(!pthread_mutex_lock(&shared->lock));
  MUST(shared->left == shared->right);
  shared->left++;
  shared->right++;
  MUST(!pthread_mutex_unlock(&shared->lock));
}

// A thread in each process that counts by itself.
static void *count(void *unused) {
  (void)unused;
  static volatile uint64_t up, down;
  for (;; usleep(200)) {
    MUST(up + down == 0);
    up++;
    down--;
    both();
  }
  return NULL;
}

static void begin_to_count(void) {
  pthread_t thread;
  MUST(!pthread_create(&thread, NULL, count, NULL));
}

static void work(int w) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGUSR1, SIG_IGN);
  begin_to_count();
  for (uint64_t expected = 0, got, one = 1;; expected++) {
    MUST(read(to[w][0], &got, 8) == 8 && got == expected);
    MUST(shared->asked[w] >= got && shared->answered[w] == expected);
    shared->answered[w] = expected + 1;
    uint64_t answer = got * 3 + w;
    MUST(write(from[w][1], &answer, 8) == 8 && write(answers, &one, 8) == 8);
  }
}

static void connect_with(int w) {
  const int kinds[WORKERS] = {0, SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM};
  if (!kinds[w]) {
    MUST(!pipe(to[w]) && !pipe(from[w]));
    return;
  }
  int pair[2];
  MUST(!socketpair(AF_UNIX, kinds[w], 0, pair));
  to[w][1] = from[w][0] = pair[0];
  to[w][0] = from[w][1] = pair[1];
}

static void make_child(void) {
  wanted = 0;
  pid_t child = fork();
  MUST(child >= 0);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // And one of its own, which is an orphan when it ends.
    if (fork() == 0)
      prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;)
      pause();
  }
  dprintf(1, "made\n");
}

int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "adopts"))
    MUST(!prctl(PR_SET_CHILD_SUBREAPER, 1));
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  MUST(shared != MAP_FAILED);
  pthread_mutexattr_t between;
  MUST(!pthread_mutexattr_init(&between) && !pthread_mutexattr_setpshared(&between, PTHREAD_PROCESS_SHARED));
  MUST(!pthread_mutex_init(&shared->lock, &between));
  answers = eventfd(0, EFD_SEMAPHORE);
  MUST(answers >= 0);
  for (int w = 0; w < WORKERS; w++) {
    connect_with(w);
    if (fork() == 0)
      work(w);
  }
  signal(SIGUSR1, want);
  begin_to_count();
  uint64_t sent[WORKERS] = {0}, received[WORKERS] = {0}, answer, one;
  for (uint64_t turn = 0;; turn++) {
    for (int w = 0; w < WORKERS; w++)
      for (; sent[w] < received[w] + AHEAD; sent[w]++) {
        shared->asked[w] = sent[w];
        MUST(write(to[w][1], &sent[w], 8) == 8);
      }
    for (int w = 0; w < WORKERS; w++) {
      MUST(read(from[w][0], &answer, 8) == 8 && answer == received[w] * 3 + w);
      received[w]++;
      MUST(shared->answered[w] >= received[w] && shared->answered[w] <= sent[w]);
      MUST(read(answers, &one, 8) == 8);
    }
    // None of its children has ended, and there are no others.
    MUST(waitpid(-1, NULL, WNOHANG | __WALL) == 0);
    if (wanted)
      make_child();
    if (turn % 40 == 0)
      give_way(0.004);
    if (turn % 200 == 0)
      dprintf(1, "turn %llu\n", (unsigned long long)turn);
  }
}
