// Programs of which there are several at a time, with the same directory: each notes what it found in a line of its own.
#include "target.h"
#include <sys/file.h>

#define ROOM (24ul << 20)
#define THREADS 4
#define STEPS (128ul << 10)
#define NAPS 16

static char *memory;
static uint64_t results[THREADS];

// A walk through all of the memory, each step of which depends on what was found at the one before. It lasts across the cut.
static void *walk(void *argument) {
  uint64_t x = (uint64_t)(long)argument;
  const uint64_t *words = (const uint64_t *)memory, steps = soaks() ? STEPS : STEPS / 4;
  for (int part = 0; part < NAPS; part++) {
    for (uint64_t step = 0; step < steps; step++)
      x = mix(x ^ words[x % (ROOM / 8)]);
    give_way(0.01);
  }
  results[(long)argument] = x;
  return 0;
}

static void note(const char *name, const char *format, ...) {
  char line[256];
  va_list args;
  va_start(args, format);
  int length = vsnprintf(line, sizeof line, format, args);
  va_end(args);
  int file = open(path_of(name), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  MUST(file >= 0 && write(file, line, length) == length);
  close(file);
}

// A number that none of the others has.
static int take_number(void) {
  for (int number = 0;; number++) {
    char name[32];
    snprintf(name, sizeof name, "number.%d", number);
    int file = open(path_of(name), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0) {
      close(file);
      return number;
    }
    MUST(errno == EEXIST);
  }
}

static void make(void) {
  memory = map_anon(ROOM);
  for (size_t at = 0; at < ROOM; at += PAGE)
    fill(memory + at, PAGE, at);
}

// Threads that compute across the cut; then each writes all of its memory while the others do.
static void compute(void) {
  make();
  pthread_t threads[THREADS];
  for (long i = 0; i < THREADS; i++)
    threads[i] = spawn(walk, (void *)i);
  cut();
  uint64_t result = 0;
  for (int i = 0; i < THREADS; i++) {
    pthread_join(threads[i], 0);
    result = mix(result ^ results[i]);
  }
  for (size_t page = 0; page < ROOM; page += PAGE)
    CHECK(filled(memory + page, PAGE, page));
  int number = take_number();
  for (int turn = 0; turn < 3; turn++) {
    fill(memory, ROOM, number * 1000 + turn);
    nap(0.02);
    CHECK(filled(memory, ROOM, number * 1000 + turn));
  }
  note("results", "%s %#llx pid %d\n", failures ? "bad" : "good", (unsigned long long)result, getpid());
}

// There can be one only.
static void locked(void) {
  make();
  int file = open(path_of("lock"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  MUST(file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0);
  cut();
  note("results", "good\n");
}

// Ends when it is told to, each time in another way: a line of its standard input, the end of it, or a signal.
static void listens(void) {
  make();
  ready();
  wait_go();
  char byte;
  EQUAL(read(0, &byte, 1), 0);
  CHECK(filled(memory, PAGE, 0));
  note("results", "good\n");
}

// More memory than there is for many, of which little is stored.
static void large(void) {
  make();
  size_t bytes = (size_t)sysconf(_SC_PHYS_PAGES) * PAGE / 100;
  char *all = map_anon(bytes);
  for (size_t at = 0; at < bytes; at += PAGE)
    all[at] = 1;
  cut();
}

SCENARIOS({"compute", compute}, {"locked", locked}, {"listens", listens}, {"large", large})
