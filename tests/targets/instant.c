// Threads that write all the time, and whose every step, seen half done, is different from all others.
#include "hostile.h"

// --- chains: each link is as far as the one behind it, or one step ahead

#define CHAINS 4
#define LINKS 64

static volatile uint64_t *chains[CHAINS];
static uint64_t passed[CHAINS];

static volatile uint64_t *link_of(long chain, long i) {
  return &chains[chain][i * WORDS + i * 61 % WORDS];
}

static void pass(long me) {
  for (int n = 0; n < 8; n++) {
    for (long i = 0; i < LINKS; i++)
      *link_of(me, i) += 1;
    passed[me]++;
  }
  for (long i = 0; i < LINKS; i++)
    EQUAL(*link_of(me, i), passed[me]);
}

static void follow(long me) { // from the last link to the first: none is behind those that follow it
  for (long chain = 0; chain < CHAINS; chain++) {
    uint64_t last = 0;
    for (long i = LINKS - 1; i >= 0; i--) {
      uint64_t here = *link_of(chain, i);
      CHECK(here >= last);
      last = here;
    }
  }
  (void)me;
}

static void (*const pass_and_follow[])(long) = {pass, pass, pass, pass, follow};

static void make_chains(void) {
  for (long i = 0; i < CHAINS; i++)
    chains[i] = map_anon(LINKS * PAGE);
}

static void check_chains(void) {
  for (long chain = 0; chain < CHAINS; chain++)
    for (long i = 0; i < LINKS; i++)
      EQUAL(*link_of(chain, i), passed[chain]);
}

static void sequences(void) {
  make_chains();
  together(pass_and_follow, COUNT(pass_and_follow));
  check_chains();
}

// The same in memory that is shared (with nobody), which is reached through two mappings in turn.
static volatile uint64_t *twins[2];
static uint64_t twinned[2];

static void write_twins(long me) {
  for (long i = 0; i < 2 * LINKS; i++)
    twins[(i + me) % 2][i % LINKS * WORDS + 5 + me] += 1;
  twinned[me] += 2;
  for (long i = 0; i < LINKS; i++) {
    EQUAL(twins[0][i * WORDS + 5 + me], twinned[me]);
    EQUAL(twins[1][i * WORDS + 5 + me], twinned[me]);
  }
}

static void (*const both_twins[])(long) = {write_twins, write_twins};

static void shared_anonymous(void) {
  char *p = mmap(0, LINKS * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  MUST(p != MAP_FAILED);
  char *q = mremap(p, 0, LINKS * PAGE, MREMAP_MAYMOVE);
  MUST(q != MAP_FAILED);
  twins[0] = (void *)p;
  twins[1] = (void *)q;
  together(both_twins, 2);
}

static void mapped_twice(void) {
  int fd = syscall(SYS_memfd_create, "twins", 1);
  MUST(fd >= 0 && ftruncate(fd, LINKS * PAGE) == 0);
  for (int i = 0; i < 2; i++) {
    twins[i] = mmap(0, LINKS * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    MUST(twins[i] != MAP_FAILED);
  }
  close(fd);
  together(both_twins, 2);
}

// --- a hash over a large buffer, told now and then: the output must be that of an undisturbed run

#define STEPS 600000
#define TELL 20000

static void rolling(void) {
  struct cells c = cells_in(map_anon(8 * MIB), 8 * MIB, 1);
  uint64_t hash = 0;
  ready();
  for (long step = 0; step < STEPS; step++) {
    uint64_t r = mix(step), old = c.at[r % c.words];
    c.sum += mix(old + step) - old;
    c.at[r % c.words] = mix(old + step);
    hash = mix(hash ^ old);
    if (step % TELL == 0) {
      say("step %ld hash %016llx sum %016llx", step, (long long)hash, (long long)c.sum);
      cells_hold(&c);
    }
    if (step % 100 == 0 && !gone())
      nap(0.0004);
  }
  wait_go();
  cells_hold(&c);
  say("hash %016llx sum %016llx", (long long)hash, (long long)c.sum);
}

// --- a ring without locks, of which each cell is a page

#define CELLS 64
#define PRODUCERS 2
#define CONSUMERS 2

static struct cell {
  volatile uint64_t turn, from, number;
  char rest[PAGE - 24];
} *ring;
static volatile uint64_t *tail, *head; // where the next is put, and taken; each in a page of its own
static uint64_t put_count[PRODUCERS], taken_count[CONSUMERS], taken_last[CONSUMERS][PRODUCERS];
static uint64_t put_sum[PRODUCERS], taken_sum[CONSUMERS];

static int put(uint64_t from, uint64_t number) {
  uint64_t at = __atomic_load_n(tail, __ATOMIC_ACQUIRE);
  for (;;) {
    struct cell *cell = &ring[at % CELLS];
    int64_t ahead = (int64_t)(__atomic_load_n(&cell->turn, __ATOMIC_ACQUIRE) - at);
    if (ahead < 0)
      return 0; // full
    if (ahead == 0 && __atomic_compare_exchange_n(tail, &at, at + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      cell->from = from;
      cell->number = number;
      __atomic_store_n(&cell->turn, at + 1, __ATOMIC_RELEASE);
      return 1;
    }
    if (ahead > 0)
      at = __atomic_load_n(tail, __ATOMIC_ACQUIRE);
  }
}

static int take(uint64_t *from, uint64_t *number) {
  uint64_t at = __atomic_load_n(head, __ATOMIC_ACQUIRE);
  for (;;) {
    struct cell *cell = &ring[at % CELLS];
    int64_t ahead = (int64_t)(__atomic_load_n(&cell->turn, __ATOMIC_ACQUIRE) - (at + 1));
    if (ahead < 0)
      return 0; // empty
    if (ahead == 0 && __atomic_compare_exchange_n(head, &at, at + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      *from = cell->from;
      *number = cell->number;
      __atomic_store_n(&cell->turn, at + CELLS, __ATOMIC_RELEASE);
      return 1;
    }
    if (ahead > 0)
      at = __atomic_load_n(head, __ATOMIC_ACQUIRE);
  }
}

static void produce(long me) {
  for (int n = 0; n < 200; n++) {
    uint64_t number = put_count[me] + 1;
    while (!put(me, number)) {
      if (stop)
        return;
      nap(0.0001);
    }
    put_count[me] = number;
    put_sum[me] += mix(number);
  }
}

static void consume_up_to(long c, int most) {
  uint64_t from, number;
  while (most-- && take(&from, &number)) {
    CHECK(from < PRODUCERS && number > taken_last[c][from % PRODUCERS]);
    taken_last[c][from % PRODUCERS] = number;
    taken_count[c]++;
    taken_sum[c] += mix(number);
  }
}

static void consume(long me) {
  consume_up_to(me - PRODUCERS, 200);
}

static void (*const producers_and_consumers[])(long) = {produce, produce, consume, consume};

static void queue(void) {
  ring = map_anon(CELLS * PAGE);
  tail = map_anon(PAGE);
  head = map_anon(PAGE);
  for (int i = 0; i < CELLS; i++)
    ring[i].turn = i;
  together(producers_and_consumers, PRODUCERS + CONSUMERS);
  consume_up_to(0, CELLS);
  EQUAL(taken_count[0] + taken_count[1], put_count[0] + put_count[1]);
  EQUAL(taken_sum[0] + taken_sum[1], put_sum[0] + put_sum[1]);
  CHECK(put_count[0] > 100 && put_count[1] > 100);
}

// --- pages that change places

static struct slots pages[2];

static void exchange(long me) {
  struct slots *s = &pages[me];
  long a = any(&s->random, s->count), b = any(&s->random, s->count);
  slots_hold(s, a, 1);
  slots_hold(s, b, 1);
  volatile uint64_t *x = (void *)(s->at + a * PAGE), *y = (void *)(s->at + b * PAGE);
  for (size_t i = 0; i < WORDS && a != b; i++) {
    uint64_t kept = x[i];
    x[i] = y[i];
    y[i] = kept;
  }
  uint64_t kept = s->seed[a];
  s->seed[a] = s->seed[b];
  s->seed[b] = kept;
}

static void (*const exchanges[])(long) = {exchange, exchange};

static void swapped_pages(void) {
  for (int i = 0; i < 2; i++) {
    pages[i] = slots_in(map_anon(128 * PAGE), 128, i);
    slots_fill(&pages[i]);
  }
  together(exchanges, 2);
  for (int i = 0; i < 2; i++)
    slots_hold(&pages[i], 0, pages[i].count);
}

// --- mappings of files: private copies of their pages, some of which are given up again; and shared ones

static struct cells in_file[2];

static void write_file(long me) {
  struct cells *c = &in_file[me];
  cells_grow(c, 300);
  if (rounds[me] % 8 == 0)
    cells_hold(c);
}

static void write_and_drop(long me) {
  struct cells *c = &in_file[me];
  write_file(me);
  size_t first = any(&c->seed, c->words / WORDS - 4) * WORDS;
  cells_change(c, first, 4 * WORDS, 0);
  EQUAL(madvise((void *)(c->at + first), 4 * PAGE, MADV_DONTNEED), 0);
  cells_change(c, first, 4 * WORDS, 1);
}

static void *file_mapping(const char *name, size_t bytes, int flags) {
  int fd = open(path_of(name), O_RDWR | O_CREAT | O_TRUNC, 0600);
  MUST(fd >= 0);
  char *data = malloc(bytes);
  fill(data, bytes, 7);
  MUST(write(fd, data, bytes) == (ssize_t)bytes);
  free(data);
  void *p = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  MUST(p != MAP_FAILED);
  close(fd);
  return p;
}

static void in_files(int flags, void (*round)(long)) {
  void (*const both[])(long) = {round, round};
  for (int i = 0; i < 2; i++)
    in_file[i] = cells_in(file_mapping(i ? "second" : "first", 128 * PAGE, flags), 128 * PAGE, i);
  together(both, 2);
  for (int i = 0; i < 2; i++)
    cells_hold(&in_file[i]);
}

static void private_file(void) {
  in_files(MAP_PRIVATE, write_and_drop);
}

static void shared_file(void) {
  in_files(MAP_SHARED, write_file);
}

// --- some memory that stays, and a little of it that changes all the time

static struct slots many;

static void change_a_few(long me) {
  (void)me;
  for (int n = 0; n < 4; n++) {
    long i = any(&many.random, many.count);
    slots_hold(&many, i, 1);
    many.seed[i] = many.random << 12 | 1;
    fill(many.at + i * PAGE, PAGE, many.seed[i]);
  }
  nap(0.002);
}

static void lasting(void) {
  many = slots_in(map_anon(16 * MIB), 16 * MIB / PAGE, 1);
  slots_fill(&many);
  void (*const one[])(long) = {change_a_few};
  together(one, 1);
  slots_hold(&many, 0, many.count);
}

SCENARIOS({"sequences", sequences}, {"shared_anonymous", shared_anonymous}, {"mapped_twice", mapped_twice},
          {"rolling", rolling}, {"queue", queue}, {"swapped_pages", swapped_pages}, {"private_file", private_file},
          {"shared_file", shared_file}, {"lasting", lasting})
