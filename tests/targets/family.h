// What target programs of several processes share: a board that all of them see, and children that are judged by their
// ends.
#ifndef FAMILY_H
#define FAMILY_H
#include "target.h"

static struct board {
  int arrived;
  int failures;
  long words[1000];
  pid_t ids[100];
  pthread_mutex_t mutex;
} *board;

static UNUSED void open_board(void) {
  board = mmap(0, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  MUST(board != MAP_FAILED);
}

static UNUSED void arrive(void) {
  __atomic_add_fetch(&board->arrived, 1, __ATOMIC_SEQ_CST);
}

static UNUSED void await_arrivals(int n) {
  while (__atomic_load_n(&board->arrived, __ATOMIC_SEQ_CST) < n)
    nap(0.0005);
}

// The end of a child: with 0 if it found no differences. The board, where there is one, counts them too: not every
// child is waited for.
static UNUSED void ends(void) {
  if (failures && board)
    __atomic_add_fetch(&board->failures, failures, __ATOMIC_SEQ_CST);
  _exit(failures ? 1 : 0);
}

static UNUSED pid_t child(void (*run)(long), long argument) {
  pid_t pid = fork();
  MUST(pid >= 0);
  if (!pid) {
    run(argument);
    ends();
  }
  return pid;
}

// A child in new namespaces of these kinds.
static UNUSED pid_t child_in(int flags, void (*run)(long), long argument) {
  pid_t pid = syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
  if (pid < 0)
    SKIP("not permitted to make namespaces");
  if (!pid) {
    run(argument);
    ends();
  }
  return pid;
}

// New namespaces of these kinds, which this process enters, or its next children where it cannot (pids, clocks).
static UNUSED void enter_new(int flags) {
  if (unshare(flags))
    SKIP("not permitted to make namespaces");
}

static UNUSED int status_of(pid_t pid) {
  int status = -1;
  pid_t got;
  while ((got = waitpid(pid, &status, 0)) < 0 && errno == EINTR)
    ;
  EQUAL(got, pid);
  return status;
}

// Waits for the end of a child, with or without a core dump.
static UNUSED void await(pid_t pid, int expected) {
  int status = status_of(pid);
  EQUAL(status & ~0x80, expected);
}

// Waits for the end of a child that is to find no differences.
static UNUSED void await_ok(pid_t pid) {
  int status = status_of(pid);
  EQUAL(status, 0);
}
#endif
