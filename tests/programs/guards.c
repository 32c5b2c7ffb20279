// A program with a large mapping whose guard regions come and go between the snapshots that it takes of itself: back at any of
// them, each page is what a model says that was rolled back with it.
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <stillpoint.h>

#define MUST(x) \
  do \
    if (!(x)) { \
      fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); \
      _exit(1); \
    } \
  while (0)

#define PAGE 4096L
#define PAGES (24L << 8) // 24 MiB
#define SNAPSHOTS 6
#define GUARD (-1)
#define GUARD_INSTALL 102
#define GUARD_REMOVE 103

static char *arena;
static int model[PAGES];
static uint64_t taken[SNAPSHOTS];
static int ends[2];

static unsigned next(unsigned *random) {
  *random = *random * 1103515245 + 12345;
  return *random >> 8;
}

static void check(void) {
  for (long i = 0; i < PAGES; i++) {
    char got = 0;
    // The kernel reads it: a guard is an error, and no signal.
    long n = write(ends[1], arena + i * PAGE, 1);
    MUST(n == 1 || errno == EFAULT);
    if (n == 1)
      MUST(read(ends[0], &got, 1) == 1);
    if ((n != 1) != (model[i] == GUARD) || (n == 1 && got != (char)model[i])) {
      fprintf(stderr, "page %ld: %s %d, and not %d\n", i, n == 1 ? "value" : "guard", got, model[i]);
      _exit(1);
    }
  }
}

static void change(unsigned *random) {
  for (int i = 0; i < 12; i++) {
    // In few places, so that the mapping does not fall to pieces.
    long at = next(random) % 24 * (PAGES / 24) + next(random) % 3, count = 1 + next(random) % 3;
    int what = next(random) % 4, value = 1 + next(random) % 100;
    if (what == 0)
      MUST(!madvise(arena + at * PAGE, count * PAGE, GUARD_INSTALL));
    if (what == 1)
      MUST(!madvise(arena + at * PAGE, count * PAGE, GUARD_REMOVE));
    for (long k = at; k < at + count; k++) {
      if (what == 0)
        model[k] = GUARD;
      else if (what == 1 && model[k] == GUARD)
        model[k] = 0;
      else if (what == 2 && model[k] != GUARD)
        arena[k * PAGE] = (char)(model[k] = value);
      else if (what == 3 && model[k] != GUARD && !madvise(arena + k * PAGE, PAGE, MADV_DONTNEED))
        model[k] = 0;
    }
  }
}

int main(int argc, char **argv) {
  int turns = argc > 1 ? atoi(argv[1]) : 60;
  MUST(!pipe(ends));
  arena = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  MUST(arena != MAP_FAILED && !madvise(arena, PAGES * PAGE, MADV_NOHUGEPAGE));
  if (madvise(arena, PAGE, GUARD_INSTALL)) {
    puts("this kernel has no guard regions");
    return 0;
  }
  MUST(!madvise(arena, PAGE, GUARD_REMOVE));
  for (long i = 0; i < PAGES; i++)
    arena[i * PAGE] = (char)(model[i] = (int)(i % 100));
  for (int i = 0; i < SNAPSHOTS; i++) {
    unsigned random = (unsigned)i + 1;
    change(&random);
    int came = sp_snapshot(&taken[i]);
    if (came < 0) {
      fprintf(stderr, "snapshot: %s\n", sp_strerror(came));
      return 1;
    }
    check();
    if (came == 0 && i < SNAPSHOTS - 1)
      continue;
    // Only the value of the rollback tells how many there have been.
    if (came == turns)
      break;
    random = (unsigned)(came + 1) * 7919;
    change(&random);
    check();
    uint64_t between;
    MUST(sp_snapshot(&between) == 0 && sp_commit(between) == 0);
    change(&random);
    // Those that were taken later are unknown here, but are there: numbers count up.
    int to = (int)(next(&random) % SNAPSHOTS);
    int failed = sp_rollback(taken[0] + (uint64_t)to, came + 1);
    fprintf(stderr, "rollback to %d: %s\n", to, sp_strerror(failed));
    return 1;
  }
  puts("ok");
  return 0;
}
