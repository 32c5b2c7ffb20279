// For programs without an end: what they leave to others, unless all is asked of them.
#pragma once
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Whether there is time for all.
static inline int soaks(void) {
  const char *tier = getenv("STILLPOINT_TIER");
  return tier && !strcmp(tier, "soak");
}

// Leaves the processor to others for so many seconds, after each round of something endless. Not in a soak.
static inline void give_way(double seconds) {
  if (!soaks())
    usleep((useconds_t)(seconds * 1e6));
}
