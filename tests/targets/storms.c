// Programs that grow, shrink, fork, replace themselves and start threads without end.
#include "hostile.h"
#include <malloc.h>
#include <spawn.h>

extern char **environ;

// --- the heap: blocks of known contents, in a heap that is given back as soon as it can be

#define BLOCKS 64

static struct block {
  char *at;
  size_t bytes;
  uint64_t seed;
} blocks[BLOCKS];
static uint64_t heap_random = 1, heap_seed = 1;

static void resize_blocks(long me) {
  (void)me;
  for (int n = 0; n < 4; n++) {
    struct block *b = &blocks[any(&heap_random, BLOCKS)];
    CHECK(filled(b->at, b->bytes, b->seed));
    switch (any(&heap_random, 3)) {
    case 0: // another
      free(b->at);
      b->bytes = 8 * (1 + any(&heap_random, 16000));
      b->at = malloc(b->bytes);
      b->seed = heap_seed++ << 20;
      fill(b->at, b->bytes, b->seed);
      break;
    case 1: { // larger or smaller
      size_t bytes = 8 * (1 + any(&heap_random, 16000)), kept = bytes < b->bytes ? bytes : b->bytes;
      b->at = realloc(b->at, bytes);
      CHECK(filled(b->at, kept, b->seed));
      fill(b->at + kept, bytes - kept, b->seed + kept / 8);
      b->bytes = bytes;
      break;
    }
    default: // all gone, now and then, so that the heap shrinks to nothing
      if (any(&heap_random, 40))
        break;
      for (int i = 0; i < BLOCKS; i++) {
        CHECK(filled(blocks[i].at, blocks[i].bytes, blocks[i].seed));
        free(blocks[i].at);
        blocks[i] = (struct block){0};
      }
      malloc_trim(0);
    }
  }
}

static void heap(void) {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 0);
  mallopt(M_TOP_PAD, 0);
  mallopt(M_ARENA_MAX, 1);
  void (*const one[])(long) = {resize_blocks};
  together(one, 1);
  for (int i = 0; i < BLOCKS; i++)
    CHECK(filled(blocks[i].at, blocks[i].bytes, blocks[i].seed));
}

// --- stacks: of the main thread and of others, deep and shallow in turn

static uint64_t dive(uint64_t seed, long levels) {
  volatile uint64_t room[300];
  for (int i = 0; i < 300; i += 7)
    room[i] = mix(seed + i);
  uint64_t below = levels ? dive(mix(seed), levels - 1) : 0;
  for (int i = 0; i < 300; i += 7)
    if (room[i] != mix(seed + i)) {
      CHECK(!"a frame holds what was written to it");
      break;
    }
  return below + levels;
}

static uint64_t dive_random[THREADS];

static void dive_somewhere(long me) {
  long levels = any(&dive_random[me], 200);
  EQUAL(dive(dive_random[me], levels), levels * (levels + 1) / 2);
}

static void *dive_in_thread(void *unused) {
  while (!stop) {
    dive_somewhere(0);
    breathe();
  }
  return unused;
}

static void stacks(void) {
  pthread_t a = spawn(dive_in_thread, 0);
  ready();
  uint64_t random = 99;
  long deepest = 100;
  while (!gone()) { // the main thread's stack grows as it goes
    long levels = any(&random, deepest);
    EQUAL(dive(random, levels), levels * (levels + 1) / 2);
    if (deepest < 2500)
      deepest += 2;
    breathe();
  }
  stop = 1;
  pthread_join(a, 0);
}

// --- children: they come in bursts; each finds what its parent had when it was made, writes all over it, and ends

static struct slots family[2];
static volatile uint64_t born, survived;

static int child_of(struct slots *s, int writes) {
  for (long i = 0; i < s->count; i++)
    if (!slot_is(s, i, s->seed[i]))
      return 1;
  if (writes)
    memset(s->at, 0x55, s->count * PAGE);
  return 0;
}

static void write_slots(struct slots *s, int pages) {
  while (pages--) {
    long i = any(&s->random, s->count);
    slots_hold(s, i, 1);
    s->seed[i] = s->random << 12 | 1;
    fill(s->at + i * PAGE, PAGE, s->seed[i]);
  }
}

static void fork_some(long me) {
  struct slots *s = &family[me];
  pid_t children[4];
  int many = 1 + any(&s->random, 4);
  for (int i = 0; i < many; i++) {
    children[i] = fork();
    if (children[i] == 0)
      _exit(child_of(s, i & 1));
    CHECK(children[i] > 0);
    write_slots(s, 8);
    born++;
  }
  for (int i = 0; i < many; i++) {
    int status = -1;
    while (waitpid(children[i], &status, 0) < 0 && errno == EINTR)
      ;
    EQUAL(status, 0);
    survived++;
  }
  slots_hold(s, 0, s->count);
  nap(0.002 + any(&s->random, 30) * 0.001); // alone for a while
}

static void write_meanwhile(long me) {
  write_slots(&family[me], 32);
}

static void run_family(void (*storm)(long)) {
  for (int i = 0; i < 2; i++) {
    family[i] = slots_in(map_anon(128 * PAGE), 128, i);
    slots_fill(&family[i]);
  }
  void (*const both[])(long) = {storm, write_meanwhile};
  together(both, 2);
  for (int i = 0; i < 2; i++)
    slots_hold(&family[i], 0, family[i].count);
  EQUAL(born, survived);
}

static void forks(void) {
  run_family(fork_some);
}

static void start_some(long me) { // other programs, by vfork
  char *arguments[] = {"true", 0};
  pid_t child;
  EQUAL(posix_spawnp(&child, "true", 0, 0, arguments, environ), 0);
  born++;
  write_slots(&family[me], 8);
  int status = -1;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR)
    ;
  EQUAL(status, 0);
  survived++;
  nap(0.005 + any(&family[me].random, 30) * 0.001);
}

static void spawns(void) {
  run_family(start_some);
}

// --- a program that becomes itself again and again, from its main thread and from another

#define LIFE_PAGES 256

static long generation;

static void become(void) {
  char next[32], *arguments[] = {"storms", "execs", directory, 0};
  snprintf(next, sizeof next, "%ld", generation + 1);
  setenv("GENERATION", next, 1);
  execve("/proc/self/exe", arguments, environ);
  CHECK(!"exec");
}

static void *become_in_thread(void *unused) {
  become();
  return unused;
}

static struct slots own;

static void *write_own(void *unused) {
  while (!stop) {
    write_slots(&own, 16);
    breathe();
  }
  return unused;
}

static void execs(void) {
  const char *from = getenv("GENERATION");
  generation = from ? atol(from) : 0;
  own = slots_in(map_anon(LIFE_PAGES * PAGE), LIFE_PAGES, generation);
  // Fresh memory at the addresses where an earlier life had written: zeros.
  slots_hold(&own, 0, own.count);
  slots_fill(&own);
  pthread_t t = spawn(write_own, 0);
  if (generation == 0)
    ready();
  double end = now() + 0.02 + mix(generation) % 100 * 0.002;
  while (now() < end && !gone())
    nap(0.001);
  if (!gone()) {
    if (generation % 2)
      spawn(become_in_thread, 0);
    else
      become();
    for (;;)
      pause();
  }
  stop = 1;
  pthread_join(t, 0);
  slots_hold(&own, 0, own.count);
}

// --- threads without end: each adds one to a few pages of many, and ends

#define FIELDS 64

static volatile uint64_t *fields;
static volatile uint64_t begun, ended;
static uint64_t thread_random = 1;

static void *short_life(void *argument) {
  uint64_t r = (uint64_t)(uintptr_t)argument;
  char room[3000];
  memset(room, (int)r, sizeof room);
  for (int i = 0; i < 4; i++)
    __atomic_add_fetch(&fields[mix(r + i) % FIELDS * WORDS], 1, __ATOMIC_SEQ_CST);
  sched_yield();
  for (size_t i = 0; i < sizeof room; i += 100)
    CHECK(room[i] == (char)r);
  __atomic_add_fetch(&ended, 1, __ATOMIC_SEQ_CST);
  return argument;
}

static void start_threads(long me) {
  pthread_t t[4];
  (void)me;
  for (int i = 0; i < 4; i++) {
    uint64_t r = thread_random++;
    begun++;
    t[i] = spawn(short_life, (void *)r);
    if (r % 3 == 0) {
      pthread_detach(t[i]);
      t[i] = 0;
    }
  }
  for (int i = 0; i < 4; i++)
    if (t[i]) {
      void *answer = 0;
      EQUAL(pthread_join(t[i], &answer), 0);
      CHECK(answer);
    }
}

static void threads(void) {
  fields = map_anon(FIELDS * PAGE);
  void (*const one[])(long) = {start_threads};
  together(one, 1);
  for (int i = 0; i < 2000 && ended < begun; i++)
    nap(0.001);
  EQUAL(ended, begun);
  uint64_t sum = 0;
  for (int i = 0; i < FIELDS; i++)
    sum += fields[i * WORDS];
  EQUAL(sum, 4 * begun);
}

SCENARIOS({"heap", heap}, {"stacks", stacks}, {"forks", forks}, {"spawns", spawns}, {"execs", execs},
          {"threads", threads})
