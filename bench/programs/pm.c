// PM: pattern matching, Knuth-Morris-Pratt, in SIZE MiB of text; the places found are kept. The check is that they are
// the places where the pattern was put, whose last letter appears nowhere else.
#include "workload.h"

static const char PATTERN[] = "abcabcababcabcabcabcababcabcabe";
enum { LENGTH = sizeof PATTERN - 1, EVERY = 8192 };
static size_t bytes, prefix[LENGTH + 1];
static char *text;
static uint32_t *places;
static size_t found[MOST_THREADS];

static void fill(int index, int of) {
  for (size_t i = first_of(bytes, index, of); i < first_of(bytes, index + 1, of); i++) {
    size_t place = i % EVERY;
    text[i] = place < LENGTH ? PATTERN[place] : "abcd"[mix(i) & 3];
  }
}

// prefix[i]: length of the longest proper prefix of the first i letters that is also their end.
static void prepare(void) {
  for (size_t i = 1, k = 0; i < LENGTH; i++) {
    while (k > 0 && PATTERN[k] != PATTERN[i])
      k = prefix[k];
    k += PATTERN[k] == PATTERN[i];
    prefix[i + 1] = k;
  }
}

// Finds what begins in this part.
static void match(int index, int of) {
  size_t from = first_of(bytes, index, of), end = first_of(bytes, index + 1, of) + LENGTH - 1, k = 0;
  uint32_t *out = places + from / EVERY + (size_t)index;
  size_t count = 0;
  for (size_t i = from; i < end && i < bytes; i++) {
    while (k > 0 && PATTERN[k] != text[i])
      k = prefix[k];
    k += PATTERN[k] == text[i];
    if (k == LENGTH) {
      out[count++] = (uint32_t)((i + 1 - LENGTH) / EVERY);
      k = prefix[k];
    }
  }
  found[index] = count;
}

static bool all_found(uint64_t *sum) {
  size_t next = 0;
  for (int t = 0; t < threads; t++) {
    const uint32_t *in = places + first_of(bytes, t, threads) / EVERY + (size_t)t;
    for (size_t i = 0; i < found[t]; i++) {
      if (in[i] != next++)
        return false;
      *sum = mix(*sum ^ in[i]);
    }
  }
  return next == bytes / EVERY;
}

int main(int count, char **arguments) {
  begin(count, arguments);
  bytes = size << 20;
  text = memory(bytes);
  places = memory((bytes / EVERY + (size_t)threads + 1) * sizeof *places);
  in_parallel(threads, fill);
  prepare();
  uint64_t sum = 0;
  bool intact = true;
  ready();
  while (intact && another_round()) {
    in_parallel(threads, match);
    intact = all_found(&sum);
    rounds_done++;
  }
  return finish(sum, intact);
}
