// Leaves the processor to others for so many milliseconds, after each round of something endless. Not in a soak.
#pragma once
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline void give_way(unsigned ms) {
  const char *tier = getenv("STILLPOINT_TIER");
  if (!tier || strcmp(tier, "soak"))
    usleep(ms * 1000);
}
