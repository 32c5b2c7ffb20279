#define _GNU_SOURCE
#include <stdio.h>
#include <stdint.h>
#include <string.h>
#include <stdlib.h>
#include <errno.h>
#include <sys/mman.h>
// A mapping that has been paged out and in is locked, grows while it is moved, and is dropped in part, some times.
#define PAGE 4096ul
#define MINE 64
#define OTHERS 8192
static void die(const char *what) { printf("BAD %s: %s\n", what, strerror(errno)); exit(3); }
static void *map(size_t pages) {
  void *at = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) die("mmap");
  return at;
}
static void want(int round, char *at, size_t page, uint64_t wanted) {
  uint64_t has = *(volatile uint64_t *)(at + page * PAGE);
  if (has != wanted) { printf("BAD round %d page %zu has %lx wants %lx\n", round, page, has, wanted); exit(3); }
}
static void drive_out(char *others, int round) { for (size_t p = 0; p < OTHERS; p++) others[p * PAGE] = round + 1; }
int main(void) {
  char *others = map(OTHERS);
  for (int round = 0; round < 6; round++) {
    char *mine = map(MINE + 1);
    // It cannot grow where it is.
    if (mprotect(mine + MINE * PAGE, PAGE, PROT_NONE)) die("mprotect");
    for (size_t p = 0; p < MINE; p++) *(uint64_t *)(mine + p * PAGE) = 1000 * round + p + 1;
    drive_out(others, round);
    for (size_t p = 0; p < MINE; p++) want(round, mine, p, 1000 * round + p + 1);
    if (mlock(mine, MINE * PAGE)) die("mlock");
    char *moved = mremap(mine, MINE * PAGE, 2 * MINE * PAGE, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) die("mremap");
    if (moved == mine) die("it was not moved");
    if (munlock(moved, 2 * MINE * PAGE)) die("munlock");
    if (madvise(moved, MINE / 2 * PAGE, MADV_DONTNEED)) die("madvise");
    // Somebody else is there afterwards.
    char *again = mmap(mine, MINE * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (again != mine) die("mmap");
    *(uint64_t *)again = 7;
    drive_out(others, round);
    for (size_t p = 0; p < 2 * MINE; p++) want(round, moved, p, p < MINE / 2 || p >= MINE ? 0 : 1000 * round + p + 1);
    for (size_t p = 0; p < MINE; p++) want(round, again, p, p ? 0 : 7);
  }
  printf("good\n");
  return 0;
}
