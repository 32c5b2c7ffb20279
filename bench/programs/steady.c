// steady DIRECTORY MEBIBYTES TICKS PAGES: a computation that changes its memory steadily.
//
// A tick is about a millisecond of computation, and some pages are changed, PAGES in a thousand ticks, one after the other.
#include "program.h"

enum { WORDS = 512, STEPS = 300000 };

int main(int count, char **arguments) {
  if (count < 5) {
    fprintf(stderr, "%s DIRECTORY MEBIBYTES TICKS PAGES\n", arguments[0]);
    return 2;
  }
  directory = arguments[1];
  size_t pages = strtoul(arguments[2], NULL, 10) << 8;
  uint64_t ticks = strtoul(arguments[3], NULL, 10), rate = strtoul(arguments[4], NULL, 10);
  uint64_t *words = memory(pages * WORDS * sizeof *words);
  for (size_t i = 0; i < pages * WORDS; i++)
    words[i] = mix(i);
  tell("ready", "%d\n", getpid());
  uint64_t began = now(), sum = 0, written = 0;
  for (uint64_t tick = 0; tick < ticks; tick++) {
    for (int i = 0; i < STEPS; i++)
      sum = mix(sum);
    for (; written < (tick + 1) * rate / 1000; written++)
      words[written % pages * WORDS] += sum;
  }
  uint64_t took = now() - began;
  // All of it once more, without memory in between.
  uint64_t again = 0, done = 0;
  bool intact = true;
  for (uint64_t tick = 0; tick < ticks; tick++) {
    for (int i = 0; i < STEPS; i++)
      again = mix(again);
    for (; done < (tick + 1) * rate / 1000; done++)
      words[done % pages * WORDS] -= again;
  }
  for (size_t i = 0; i < pages * WORDS; i++)
    intact = intact && words[i] == mix(i);
  tell("result", "verdict %s\nseconds %.6f\ndigest %llx\n", intact ? "intact" : "broken", took / 1e9,
       (unsigned long long)sum);
  return 0;
}
