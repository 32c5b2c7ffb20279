// What the writers share that no checkpoint may ever catch between two instants. Their rule: nothing heals. What is written
// is added to what was there, or checked before it is replaced, so that a page from another moment than the rest is found
// sooner or later, and in the end at the latest.
#ifndef HOSTILE_H
#define HOSTILE_H
#include "target.h"

#define MIB (1ul << 20)
#define WORDS (PAGE / 8)
#define THREADS 16

static volatile int stop;
static volatile uint64_t rounds[THREADS];

// Leaves about half of a processor to others: works for a while, then sleeps for as long.
static UNUSED void breathe(void) {
  static __thread double since;
  double t = now();
  if (t - since > 0.001) {
    nap(0.001);
    since = now();
  }
}

// Runs one thread for each of these functions, until it is time to go. Each counts its rounds.
struct job {
  void (*round)(long me);
  long me;
};

static UNUSED void *work(void *argument) {
  struct job *job = argument;
  while (!stop) {
    job->round(job->me);
    rounds[job->me]++;
    breathe();
  }
  return 0;
}

static UNUSED int all_begun(long threads) {
  for (long i = 0; i < threads; i++)
    if (rounds[i] < 3)
      return 0;
  return 1;
}

static UNUSED void together(void (*const round[])(long), long threads) {
  static struct job jobs[THREADS];
  pthread_t t[THREADS];
  MUST(threads <= THREADS);
  for (long i = 0; i < threads; i++) {
    jobs[i] = (struct job){round[i], i};
    t[i] = spawn(work, &jobs[i]);
  }
  while (!all_begun(threads))
    nap(0.001);
  cut();
  stop = 1;
  for (long i = 0; i < threads; i++)
    pthread_join(t[i], 0);
}

// --- growth: a mapping that grows by a page at a time, and each page of it is what was written there. However it is looked at meanwhile, it is one
// mapping: to grow never fails.
static UNUSED int growing_flags;

static UNUSED void grow_one(long me) {
  static struct {
    uint64_t *at;
    size_t pages;
  } all[THREADS];
  size_t most = 4096;
  uint64_t *at = all[me].at;
  size_t pages = all[me].pages;
  if (!at) { // what is shared does not become larger than it was in the beginning
    MUST((at = mmap(0, most * PAGE, PROT_READ | PROT_WRITE, growing_flags | MAP_ANONYMOUS, -1, 0)) != MAP_FAILED);
    pages = most;
    at[0] = mix(me);
  }
  size_t next = pages < most ? pages + 1 : 1;
  uint64_t *moved = mremap(at, pages * PAGE, next * PAGE, MREMAP_MAYMOVE);
  CHECK(moved != MAP_FAILED);
  if (moved != MAP_FAILED) {
    at = moved;
    pages = next;
    if (next > 1) {
      at[(next - 1) * PAGE / 8] = mix(me + next - 1);
      size_t any = mix(next * 31 + (size_t)me) % next;
      EQUAL(at[any * PAGE / 8], mix(me + any));
    }
  }
  all[me].at = at;
  all[me].pages = pages;
}

// --- cells: a sum that is kept beside them grows by what each of them grows by

struct cells {
  volatile uint64_t *at;
  size_t words;
  uint64_t sum, seed;
};

static UNUSED uint64_t sum_of(const volatile uint64_t *at, size_t words) {
  uint64_t sum = 0;
  for (size_t i = 0; i < words; i++)
    sum += at[i];
  return sum;
}

static UNUSED struct cells cells_in(void *at, size_t bytes, uint64_t seed) {
  struct cells c = {at, bytes / 8, 0, seed * 1000003};
  c.sum = sum_of(c.at, c.words);
  return c;
}

static UNUSED void cells_grow(struct cells *c, int times) {
  while (times--) {
    uint64_t r = mix(c->seed++);
    c->at[r % c->words] += r >> 40;
    c->sum += r >> 40;
  }
}

static UNUSED void cells_hold(struct cells *c) {
  EQUAL(sum_of(c->at, c->words), c->sum);
}

// A page of theirs is about to become something else.
static UNUSED void cells_change(struct cells *c, size_t first, size_t words, int after) {
  static __thread uint64_t before;
  if (!after)
    before = sum_of(c->at + first, words);
  else
    c->sum += sum_of(c->at + first, words) - before;
}

// --- slots: pages of known contents, zeros (seed 0) or filled from a seed that is kept elsewhere

struct slots {
  char *at;
  uint64_t *seed;
  long count;
  uint64_t random;
};

static UNUSED struct slots slots_in(char *at, long count, uint64_t random) {
  struct slots s = {at, map_anon((count * 8 + PAGE - 1) & ~(PAGE - 1)), count, random * 7919};
  return s;
}

static UNUSED uint64_t any(uint64_t *random, uint64_t below) {
  return mix((*random)++) % below;
}

static UNUSED int slot_is(const struct slots *s, long i, uint64_t seed) {
  return seed ? filled(s->at + i * PAGE, PAGE, seed) : all_zero(s->at + i * PAGE, PAGE);
}

static UNUSED void slots_hold(const struct slots *s, long from, long count) {
  for (long i = from; i < from + count; i++)
    if (!slot_is(s, i, s->seed[i])) {
      say("page %ld of %ld at %p, seed %#llx", i, s->count, s->at + i * PAGE, (long long)s->seed[i]);
      CHECK(!"a page holds what was written to it");
    }
}

static UNUSED void slots_fill(struct slots *s) {
  for (long i = 0; i < s->count; i++) {
    s->seed[i] = 1 + i * WORDS;
    fill(s->at + i * PAGE, PAGE, s->seed[i]);
  }
}
#endif
