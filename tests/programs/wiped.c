#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
// Memory that is to be zeros in children, and has been paged out when they are made.
#define PAGE 4096ul
#define MINE 64
#define OTHERS 8192
static void die(const char *what) { printf("BAD %s: %s\n", what, strerror(errno)); exit(3); }
static char *map(size_t pages) {
  char *at = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) die("mmap");
  return at;
}
int main(void) {
  char *others = map(OTHERS), *mine = map(MINE), *kept = map(MINE);
  if (madvise(mine, MINE * PAGE, MADV_WIPEONFORK)) die("madvise");
  for (int round = 1; round < 6; round++) {
    for (size_t p = 0; p < MINE; p++) mine[p * PAGE] = kept[p * PAGE] = round;
    for (size_t p = 0; p < OTHERS; p++) others[p * PAGE] = round;
    pid_t child = fork();
    if (child < 0) die("fork");
    if (child == 0) {
      for (size_t p = 0; p < MINE; p++)
        if (mine[p * PAGE] != 0 || kept[p * PAGE] != round) _exit(mine[p * PAGE] ? 1 : 2);
      _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child) die("waitpid");
    if (status) { printf("BAD round %d: the child has what it must not have, or not what it must: %x\n", round, status); exit(3); }
    for (size_t p = 0; p < MINE; p++)
      if (mine[p * PAGE] != round) { printf("BAD round %d page %zu\n", round, p); exit(3); }
  }
  printf("good\n");
  return 0;
}
