// Memory that several processes have in common: they write it, drop pages of it, map it once more, and end, beside a model of
// what must be in each page. One thread has the model and tells the others what to do.
#include "hostile.h"
#include <sys/shm.h>

#define PAGES 1024
#define MOST 12 // pages of one operation

static char *arena;
static uint64_t model[PAGES]; // seeds of contents; 0: zeros
static uint64_t randomness = 77, next_seed = 1;
static int segment = -1;
static int orders[2], answers[2];
static pid_t helper, unburied;
static unsigned mask;
static uint64_t rare = 8; // one in so many operations is no mere writing

struct order {
  long from, count;
  uint64_t seed;
};

static void put(char *at, const struct order *o) {
  for (long i = 0; i < o->count; i++)
    fill(at + i * PAGE, PAGE, o->seed + i * WORDS);
}

static void holds(long from, long count) {
  for (long i = from; i < from + count; i++) {
    char *page = arena + i * PAGE;
    if (!(model[i] ? filled(page, PAGE, model[i]) : all_zero(page, PAGE))) {
      say("page %ld at %p: seed %#llx", i, page, (long long)model[i]);
      CHECK(!"a page holds what it must");
    }
  }
}

static void is_put(const struct order *o) {
  for (long i = 0; i < o->count; i++)
    model[o->from + i] = o->seed + i * WORDS;
}

// --- what may happen

static void write_pages(struct order *o) {
  put(arena + o->from * PAGE, o);
  is_put(o);
}

static void order(struct order *o) {
  char answer;
  MUST(write(orders[1], o, sizeof *o) == sizeof *o);
  MUST(read(answers[0], &answer, 1) == 1);
  is_put(o);
}

// By a child that has ended before anybody looks.
static void bear(struct order *o) {
  pid_t child = fork();
  MUST(child >= 0);
  if (child == 0) {
    put(arena + o->from * PAGE, o);
    _exit(0);
  }
  MUST(waitpid(child, 0, 0) == child);
  is_put(o);
}

// As it does, but for a while nobody waits for it.
static void bear_and_leave(struct order *o) {
  if (unburied) {
    MUST(waitpid(unburied, 0, 0) == unburied);
    unburied = 0;
    return;
  }
  unburied = fork();
  MUST(unburied >= 0);
  if (unburied == 0) {
    put(arena + o->from * PAGE, o);
    _exit(0);
  }
  siginfo_t end;
  MUST(waitid(P_PID, unburied, &end, WEXITED | WNOWAIT) == 0);
  is_put(o);
}

// Zeros, and perhaps there again before anybody looks, as such.
static void drop_for_all(struct order *o) {
  MUST(madvise(arena + o->from * PAGE, o->count * PAGE, MADV_REMOVE) == 0);
  memset(model + o->from, 0, o->count * sizeof *model);
}

static void drop_here(struct order *o) {
  MUST(madvise(arena + o->from * PAGE, o->count * PAGE, MADV_DONTNEED) == 0);
}

static void drop_what_was_written(struct order *o) {
  write_pages(o);
  drop_here(o);
}

// Through another mapping, which is gone before anybody looks.
static void map_once_more(struct order *o) {
  char *second = mremap(arena + o->from * PAGE, 0, o->count * PAGE, MREMAP_MAYMOVE);
  MUST(second != MAP_FAILED);
  put(second, o);
  munmap(second, o->count * PAGE);
  is_put(o);
}

static void attach_once_more(struct order *o) {
  char *second = shmat(segment, 0, 0);
  MUST(second != (void *)-1);
  put(second + o->from * PAGE, o);
  MUST(shmdt(second) == 0);
  is_put(o);
}

static void (*const operations[])(struct order *) = {write_pages, order, bear, drop_for_all, drop_here, drop_what_was_written,
                                                     map_once_more, attach_once_more, bear_and_leave};
enum { WRITE, ORDER, BEAR, REMOVE, DROP, FORGET, REMAP, ATTACH, LEAVE };
#define BIT(operation) (1u << (operation))

static void anything(UNUSED long me) {
  for (int n = 0; n < 8; n++) {
    struct order o = {.count = 1 + (long)any(&randomness, MOST)};
    o.from = any(&randomness, PAGES - o.count + 1);
    o.seed = next_seed++ << 20 | 1;
    unsigned operation = any(&randomness, COUNT(operations));
    if (any(&randomness, rare))
      operation = any(&randomness, 2) ? WRITE : ORDER;
    if (!(mask >> operation & 1))
      continue;
    holds(o.from, o.count);
    operations[operation](&o);
    holds(o.from, o.count);
  }
  nap(0.001);
}

static void help(void) {
  struct order o;
  char done = 1;
  close(orders[1]);
  while (read(orders[0], &o, sizeof o) == sizeof o) {
    put(arena + o.from * PAGE, &o);
    if (write(answers[1], &done, 1) != 1)
      break;
  }
  _exit(0);
}

static void (*const one[])(long) = {anything};

static void run(void) {
  struct order all = {0, PAGES, 5 << 20 | 1};
  next_seed = 100000;
  MUST(pipe(orders) == 0 && pipe(answers) == 0);
  write_pages(&all);
  helper = fork();
  MUST(helper >= 0);
  if (helper == 0)
    help();
  close(orders[0]);
  together(one, 1);
  holds(0, PAGES);
  close(orders[1]);
  MUST(waitpid(helper, 0, 0) == helper);
  if (unburied)
    MUST(waitpid(unburied, 0, 0) == unburied);
  holds(0, PAGES);
}

static void run_anonymous(void) {
  arena = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  MUST(arena != MAP_FAILED);
  run();
}

static void by_two(void) {
  mask = BIT(WRITE) | BIT(ORDER);
  run_anonymous();
}

static void by_children(void) {
  mask = BIT(WRITE) | BIT(ORDER) | BIT(BEAR);
  rare = 30;
  run_anonymous();
}

static void by_unburied(void) {
  mask = BIT(WRITE) | BIT(ORDER) | BIT(LEAVE);
  rare = 30;
  run_anonymous();
}

static void dropped(void) {
  mask = BIT(WRITE) | BIT(ORDER) | BIT(REMOVE) | BIT(DROP) | BIT(FORGET);
  rare = 60;
  run_anonymous();
}

static void remapped(void) {
  mask = BIT(WRITE) | BIT(ORDER) | BIT(REMAP);
  rare = 60;
  run_anonymous();
}

static void attached(void) {
  segment = shmget(IPC_PRIVATE, PAGES * PAGE, 0600 | IPC_CREAT);
  arena = shmat(segment, 0, 0);
  MUST(segment >= 0 && arena != (void *)-1);
  MUST(shmctl(segment, IPC_RMID, 0) == 0);
  mask = BIT(WRITE) | BIT(ORDER) | BIT(BEAR) | BIT(REMOVE) | BIT(ATTACH);
  rare = 1000;
  run();
}

static void grows(void) {
  growing_flags = MAP_SHARED;
  pid_t child = fork();
  MUST(child >= 0);
  if (!child) {
    while (!gone())
      grow_one(0);
    _exit(failures != 0);
  }
  cut();
  int status = -1;
  EQUAL(waitpid(child, &status, 0), child);
  EQUAL(status, 0);
}

SCENARIOS({"grows", grows}, {"by_two", by_two}, {"by_children", by_children}, {"by_unburied", by_unburied}, {"dropped", dropped}, {"remapped", remapped}, {"attached", attached})
