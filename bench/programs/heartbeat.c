// heartbeat DIRECTORY MEBIBYTES WRITES_PER_SECOND THREADS: a program that feels its own pauses.
//
// One thread looks at the clock all the time and keeps the longest gap; another writes random pages at a given rate;
// the rest sleep and wake. At the end every word of the memory is checked. The answer has two numbers, see `struct gaps`.
//
// A further file, `touch`, holds a number: that many different pages, spread over the memory, are written at once, then
// the file is removed. `fork` makes it fork a child that ends at once; `forked` tells for how many nanoseconds it was in the call.
#include "program.h"
#include <sys/wait.h>

enum { WORDS = 512, COUNTED = 7 };
static atomic_uint_least64_t *words;
static size_t pages;
static uint64_t rate, writes, touched;
static struct gaps gaps;
static atomic_uint_least64_t beats;

static uint64_t expected(size_t word) { return mix(word) | 1; }

static void fill(int index, int of) {
  size_t to = first_of(pages, index + 1, of) * WORDS;
  for (size_t i = first_of(pages, index, of) * WORDS; i < to; i++)
    atomic_init(&words[i], i % WORDS == COUNTED ? 0 : expected(i));
}

static atomic_uint_least64_t wrong, counted;

static void check(int index, int of) {
  uint64_t bad = 0, count = 0;
  size_t to = first_of(pages, index + 1, of) * WORDS;
  for (size_t i = first_of(pages, index, of) * WORDS; i < to; i++) {
    uint64_t value = atomic_load_explicit(&words[i], memory_order_relaxed);
    if (i % WORDS == COUNTED)
      count += value;
    else
      bad += value != expected(i);
  }
  atomic_fetch_add(&wrong, bad);
  atomic_fetch_add(&counted, count);
}

static void write_page(size_t page) {
  atomic_fetch_add_explicit(&words[page * WORDS + COUNTED], 1, memory_order_relaxed);
}

static void *beat(void *unused) {
  (void)unused;
  gaps.waited = time_waiting();
  uint64_t last = now();
  while (!atomic_load_explicit(&stopped, memory_order_relaxed)) {
    uint64_t time = now();
    note_gap(&gaps, time - last);
    atomic_fetch_add_explicit(&beats, 1, memory_order_relaxed);
    // What looking into a gap took is not a gap.
    last = time - last > WORTH_A_LOOK ? now() : time;
  }
  return NULL;
}

// After all threads stood still this one may run before the one that beats: then the gap is not known yet.
static void wait_for_a_beat(void) {
  uint64_t before = atomic_load(&beats);
  while (atomic_load(&beats) < before + 2)
    pause_for(50000);
}

static void *write_pages(void *unused) {
  (void)unused;
  enum { MILLISECOND = 1000000 };
  uint64_t x = 88172645463325252u;
  while (!atomic_load_explicit(&stopped, memory_order_relaxed)) {
    uint64_t start = now();
    for (uint64_t i = 0; i < rate / 1000; i++) {
      x ^= x << 13;
      x ^= x >> 7;
      x ^= x << 17;
      write_page(x % pages);
      writes++;
    }
    uint64_t took = now() - start;
    if (took < MILLISECOND)
      pause_for(MILLISECOND - took);
  }
  return NULL;
}

static void *sleep_and_wake(void *unused) {
  (void)unused;
  while (!atomic_load_explicit(&stopped, memory_order_relaxed))
    pause_for(20000000);
  return NULL;
}

// One page in each stretch of the memory, another one each time.
static void touch(void) {
  char at[4096];
  FILE *file = fopen(path("touch", at, sizeof at), "r");
  size_t count = 0;
  if (!file)
    return;
  if (fscanf(file, "%zu", &count) != 1)
    count = 0;
  fclose(file);
  for (size_t i = 0; i < count && i < pages; i++) {
    size_t from = pages * i / count, stretch = pages * (i + 1) / count - from;
    write_page(from + mix(touched) % stretch);
    touched++;
  }
  unlink(at);
}

static void fork_once(void) {
  char at[4096];
  uint64_t began = now();
  pid_t child = fork();
  uint64_t took = now() - began;
  if (child == 0)
    _exit(0);
  if (child < 0 || waitpid(child, NULL, 0) != child)
    die("fork");
  tell("forked", "%llu\n", (unsigned long long)took);
  unlink(path("fork", at, sizeof at));
}

int main(int count, char **arguments) {
  if (count < 5) {
    fprintf(stderr, "%s DIRECTORY MEBIBYTES WRITES_PER_SECOND THREADS\n", arguments[0]);
    return 2;
  }
  directory = arguments[1];
  pages = strtoul(arguments[2], NULL, 10) << 8;
  rate = strtoull(arguments[3], NULL, 10);
  int threads = atoi(arguments[4]), processors = (int)sysconf(_SC_NPROCESSORS_ONLN);
  if (pages == 0 || threads < 2 || threads > MOST_THREADS)
    return 2;
  processors = processors < MOST_THREADS ? processors : MOST_THREADS;
  words = memory(pages * WORDS * sizeof *words);
  in_parallel(processors, fill);
  pthread_t thread[MOST_THREADS];
  // The main thread is one of them.
  for (int i = 0; i < threads - 1; i++)
    if (pthread_create(&thread[i], NULL, i == 0 ? beat : i == 1 && rate ? write_pages : sleep_and_wake, NULL))
      die("pthread_create");
  tell("ready", "%d\n", getpid());
  while (!exists("stop")) {
    if (asked()) {
      wait_for_a_beat();
      answer_gaps(&gaps);
    }
    if (exists("touch"))
      touch();
    if (exists("fork"))
      fork_once();
    pause_for(2000000);
  }
  atomic_store(&stopped, true);
  for (int i = 0; i < threads - 1; i++)
    pthread_join(thread[i], NULL);
  in_parallel(processors, check);
  bool intact = wrong == 0 && counted == writes + touched;
  tell("result", "wrong %llu\ncounted %llu\nwrites %llu\nverdict %s\n", (unsigned long long)wrong,
       (unsigned long long)counted, (unsigned long long)(writes + touched), intact ? "intact" : "wrong");
  return intact ? 0 : 1;
}
