// comers DIRECTORY THREADS: threads that come and go.
//
// So many are there at a time. Each waits a few milliseconds, counts itself, starts the one that takes its place, and ends. One
// more does nothing but look at the clock. The answer has two numbers, see `struct gaps`.
#include "program.h"

enum { MILLISECOND = 1000000, STACK = 64 << 10 };

static struct gaps gaps;
static atomic_uint_least64_t begun, ended;
static atomic_int there;

static void begin(void);

static void *come_and_go(void *argument) {
  uint64_t number = (uint64_t)(uintptr_t)argument;
  // Between 20 and 84 ms.
  pause_for(20 * MILLISECOND + mix(number) % (64 * MILLISECOND));
  atomic_fetch_add(&ended, 1);
  if (!atomic_load(&stopped))
    begin();
  atomic_fetch_sub(&there, 1);
  return NULL;
}

static void begin(void) {
  pthread_attr_t attributes;
  pthread_t thread;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  atomic_fetch_add(&there, 1);
  if (pthread_create(&thread, &attributes, come_and_go, (void *)(uintptr_t)atomic_fetch_add(&begun, 1)))
    die("pthread_create");
  pthread_attr_destroy(&attributes);
}

int main(int count, char **arguments) {
  if (count != 3)
    return fprintf(stderr, "usage: comers DIRECTORY THREADS\n"), 2;
  directory = arguments[1];
  for (int threads = atoi(arguments[2]); threads > 0; threads--)
    begin();
  tell("ready", "\n");
  gaps.waited = time_waiting();
  for (uint64_t last = now(), looked = last; !atomic_load(&stopped);) {
    uint64_t time = now();
    note_gap(&gaps, time - last);
    last = time;
    if (time - looked > MILLISECOND) {
      looked = time;
      if (asked())
        answer_gaps(&gaps);
      if (exists("stop"))
        atomic_store(&stopped, true);
      last = now();
    }
  }
  while (atomic_load(&there) > 0)
    pause_for(MILLISECOND);
  bool intact = atomic_load(&begun) == atomic_load(&ended);
  tell("result", "threads %llu\nverdict %s\n", (unsigned long long)atomic_load(&begun), intact ? "intact" : "broken");
  return 0;
}
