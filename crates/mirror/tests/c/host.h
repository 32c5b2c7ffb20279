/* What the hosts of the mirrored programs share: steps with a checkpoint after each, and a look for stale bytes. */
#include "stillpoint_mirror.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline void after_step(long step) {
  int64_t number = stillpoint_mirror_checkpoint();
  if (step % 16 == 0) {
    while (number == -1) {
      usleep(100);
      number = stillpoint_mirror_checkpoint();
    }
    /* Nobody stores while this thread waits: a byte that differs then went by the barrier. */
    if (stillpoint_mirror_wait(number) != 0) {
      fprintf(stderr, "a checkpoint failed\n");
      _exit(3);
    }
    struct stillpoint_mirror_stats stats;
    do
      stillpoint_mirror_stats(&stats);
    while (stats.phase != STILLPOINT_MIRROR_ATTACHED);
    uint64_t stale = stillpoint_mirror_differing();
    if (stale) {
      fprintf(stderr, "%lu stale bytes after step %ld\n", (unsigned long)stale, step);
      _exit(4);
    }
  }
}
