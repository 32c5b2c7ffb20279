// Mappings that come and go, move, grow, shrink, are dropped and protected, at random, beside a model that tells what must
// be in each page. One thread owns an arena of address space and everything in it.
#include "hostile.h"
#include <sys/prctl.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#define GUARD_INSTALL 102
#define GUARD_REMOVE 103
#define COLLAPSE 25
#define MOST 24 // pages of one operation, mostly
#define FILE_SEED 999

enum kind { HOLE, ANON, FILE_COPY, SHARED };

struct page {
  uint64_t seed; // of its contents; 0: zeros
  uint16_t file_page;
  uint8_t kind, access;
  uint8_t maybe; // may have become zeros: MADV_FREE
  uint8_t guard, locked;
};

struct arena {
  char *at;
  struct page *pages;
  uint64_t random, seed;
  uint64_t done[32];
};

static struct arena arenas[2];
static long arena_pages = 512;
static long most_pages = 512; // of one operation, now and then
static int calm;              // mostly writes, and a pause now and then
static int untouched; // of the second arena, one page in so many is never touched, if any is
static int pattern; // a file of arena_pages pages
static unsigned mask;

static char *address(const struct arena *a, long i) {
  return a->at + i * PAGE;
}

static int readable(const struct page *p) {
  return p->kind != HOLE && (p->access & PROT_READ) && !p->guard;
}

static void holds(const struct arena *a, long from, long count) {
  for (long i = from; i < from + count; i++) {
    const struct page *p = &a->pages[i];
    if (!readable(p))
      continue;
    if (p->maybe && all_zero(address(a, i), PAGE))
      continue;
    if (!(p->seed ? filled(address(a, i), PAGE, p->seed) : all_zero(address(a, i), PAGE))) {
      say("page %ld at %p: kind %d access %d maybe %d seed %#llx", i, address(a, i), p->kind, p->access, p->maybe,
          (long long)p->seed);
      CHECK(!"a page holds what it must");
    }
  }
}

static void become(struct arena *a, long from, long count, enum kind kind) {
  for (long i = from; i < from + count; i++) {
    uint64_t seed = kind == FILE_COPY ? FILE_SEED + i * WORDS : 0;
    a->pages[i] = (struct page){.seed = seed, .file_page = i, .kind = kind, .access = PROT_READ | PROT_WRITE};
  }
}

// The pages from `from` on that are alike, at most `most`.
static long alike(const struct arena *a, long from, long most) {
  const struct page *p = &a->pages[from];
  long n = 1;
  while (n < most && from + n < arena_pages && p[n].kind == p->kind && p[n].access == p->access && p[n].guard == p->guard &&
         p[n].locked == p->locked && (p->kind != FILE_COPY || p[n].file_page == p->file_page + n))
    n++;
  return n;
}

// --- what may happen; each gets a range

static void write_pages(struct arena *a, long from, long count) {
  for (long i = from; i < from + count; i++) {
    struct page *p = &a->pages[i];
    if (!readable(p) || !(p->access & PROT_WRITE))
      continue;
    p->seed = a->seed++ << 12 | 1;
    p->maybe = 0;
    fill(address(a, i), PAGE, p->seed);
  }
}

static void zero_pages(struct arena *a, long from, long count) {
  for (long i = from; i < from + count; i++) {
    struct page *p = &a->pages[i];
    if (!readable(p) || !(p->access & PROT_WRITE))
      continue;
    p->seed = 0;
    p->maybe = 0;
    memset(address(a, i), 0, PAGE);
  }
}

static void map_new(struct arena *a, long from, long count, enum kind kind) {
  int flags = kind == ANON ? MAP_PRIVATE | MAP_ANONYMOUS : kind == SHARED ? MAP_SHARED | MAP_ANONYMOUS : MAP_PRIVATE;
  char *p = mmap(address(a, from), count * PAGE, PROT_READ | PROT_WRITE, flags | MAP_FIXED,
                 kind == FILE_COPY ? pattern : -1, kind == FILE_COPY ? from * PAGE : 0);
  CHECK(p == address(a, from));
  become(a, from, count, kind);
}

static void map_anonymous(struct arena *a, long from, long count) {
  map_new(a, from, count, ANON);
}

static void map_shared(struct arena *a, long from, long count) {
  map_new(a, from, count, SHARED);
}

static void map_file(struct arena *a, long from, long count) {
  map_new(a, from, count, FILE_COPY);
}

static void unmap(struct arena *a, long from, long count) {
  EQUAL(munmap(address(a, from), count * PAGE), 0);
  become(a, from, count, HOLE);
}

static void drop(struct arena *a, long from, long count) {
  count = alike(a, from, count);
  struct page *p = &a->pages[from];
  if (p->kind == HOLE || madvise(address(a, from), count * PAGE, MADV_DONTNEED))
    return;
  for (long i = 0; i < count && p->kind != SHARED; i++) {
    p[i].seed = p[i].kind == FILE_COPY ? FILE_SEED + p[i].file_page * WORDS : 0;
    p[i].maybe = 0;
  }
}

static void free_pages(struct arena *a, long from, long count) {
  count = alike(a, from, count);
  struct page *p = &a->pages[from];
  if (p->kind == ANON && !p->guard && !madvise(address(a, from), count * PAGE, MADV_FREE))
    for (long i = 0; i < count; i++)
      p[i].maybe = 1;
}

static void protect(struct arena *a, long from, long count) {
  static const int accesses[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE};
  count = alike(a, from, count);
  int access = accesses[any(&a->random, COUNT(accesses))];
  if (a->pages[from].kind == HOLE)
    return;
  EQUAL(mprotect(address(a, from), count * PAGE, access), 0);
  for (long i = from; i < from + count; i++)
    a->pages[i].access = access;
}

static void guard(struct arena *a, long from, long count) {
  count = alike(a, from, count);
  struct page *p = &a->pages[from];
  if (p->kind != ANON)
    return;
  int install = !p->guard;
  if (madvise(address(a, from), count * PAGE, install ? GUARD_INSTALL : GUARD_REMOVE))
    return;
  for (long i = 0; i < count; i++) {
    p[i].guard = install;
    p[i].seed = 0;
    p[i].maybe = 0;
  }
}

static void advise(struct arena *a, long from, long count) { // changes no contents
  static const int advices[] = {MADV_COLD, MADV_PAGEOUT, 22 /* POPULATE_READ */, 23 /* POPULATE_WRITE */, MADV_WILLNEED,
                                MADV_DONTFORK, MADV_DOFORK, MADV_SEQUENTIAL, MADV_NORMAL};
  madvise(address(a, from), count * PAGE, advices[any(&a->random, COUNT(advices))]);
}

static void lock(struct arena *a, long from, long count) {
  count = alike(a, from, count);
  if (a->pages[from].kind == HOLE)
    return;
  int locking = any(&a->random, 2);
  if (locking)
    mlock(address(a, from), count * PAGE); // which complains of pages that cannot be brought in, but locks them too
  else
    munlock(address(a, from), count * PAGE);
  for (long i = from; i < from + count; i++)
    a->pages[i].locked = locking;
}

// Of another place in the arena that does not touch the range; -1 if there is none at hand.
static long elsewhere(struct arena *a, long from, long count) {
  long to = any(&a->random, arena_pages - count + 1);
  return to + count <= from || from + count <= to ? to : -1;
}

static void moved(struct arena *a, long from, long to, long count) {
  memcpy(&a->pages[to], &a->pages[from], count * sizeof *a->pages);
}

static int move_to(struct arena *a, long from, long to, long count, int more) {
  char *p = mremap(address(a, from), count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED | more, address(a, to));
  if (p == MAP_FAILED) // of several mappings: the destination may be gone already
    return 0;
  moved(a, from, to, count);
  return 1;
}

// The length of the mapping at an address as the kernel sees it, from procfs: only within one can mremap move.
static long within_mapping(const struct arena *a, long from, long count) {
  char line[512];
  FILE *f = fopen("/proc/thread-self/maps", "re");
  unsigned long start, end, at = (unsigned long)(uintptr_t)address(a, from);
  long pages = 0;
  while (f && fgets(line, sizeof line, f))
    if (sscanf(line, "%lx-%lx", &start, &end) == 2 && start <= at && at < end)
      pages = (long)((end - at) / PAGE);
  if (f)
    fclose(f);
  return pages < count ? pages : count;
}

static void move(struct arena *a, long from, long count) {
  count = within_mapping(a, from, alike(a, from, count));
  long to = count ? elsewhere(a, from, count) : -1;
  if (to < 0 || a->pages[from].kind == HOLE)
    return;
  holds(a, from, count);
  if (move_to(a, from, to, count, 0))
    become(a, from, count, HOLE);
  else if (errno == EFAULT && within_mapping(a, from, count) < count)
    return unmap(a, to, count); // it was one mapping and is two: a part of it is followed now, and the other is not
  else
    CHECK(!"mremap moves");
  holds(a, to, count);
}

static void move_and_keep(struct arena *a, long from, long count) { // the old place stays, empty
  count = within_mapping(a, from, alike(a, from, count));
  long to = count ? elsewhere(a, from, count) : -1;
  if (to < 0 || a->pages[from].kind != ANON || a->pages[from].guard)
    return;
  if (!move_to(a, from, to, count, MREMAP_DONTUNMAP))
    return unmap(a, to, count); // locked memory is not kept so; whether the destination is still mapped is open
  for (long i = from; i < from + count; i++) {
    a->pages[i].seed = 0;
    a->pages[i].maybe = 0;
    a->pages[i].locked = 0;
  }
  holds(a, from, count);
  holds(a, to, count);
}

static void grow(struct arena *a, long from, long count) {
  struct page *p = &a->pages[from];
  long have = alike(a, from, count), more = 0;
  while (have + more < count + 4 && from + have + more < arena_pages && p[have + more].kind == HOLE)
    more++;
  if (p->kind != ANON || p->guard || !more)
    return;
  if (mremap(address(a, from), have * PAGE, (have + more) * PAGE, 0) == MAP_FAILED)
    return; // in the middle of a mapping
  become(a, from + have, more, ANON);
  for (long i = from + have; i < from + have + more; i++) {
    a->pages[i].access = p->access;
    a->pages[i].locked = p->locked;
  }
}

static void shrink(struct arena *a, long from, long count) {
  long have = within_mapping(a, from, alike(a, from, count)), keep = (have + 1) / 2;
  if (a->pages[from].kind == HOLE || have < 2)
    return;
  CHECK(mremap(address(a, from), have * PAGE, keep * PAGE, 0) == address(a, from));
  become(a, from + keep, have - keep, HOLE);
}

static void collapse(struct arena *a, long from, long count) {
  (void)from, (void)count;
  if (any(&a->random, 2))
    map_new(a, 0, arena_pages, ANON);
  else
    for (long i = 0; i < arena_pages; i += alike(a, i, arena_pages))
      if (a->pages[i].kind == HOLE)
        map_new(a, i, alike(a, i, arena_pages), ANON);
  madvise(a->at, arena_pages * PAGE, any(&a->random, 3) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  write_pages(a, any(&a->random, arena_pages / 2), arena_pages / 2);
  madvise(a->at, arena_pages * PAGE, COLLAPSE);
  holds(a, 0, arena_pages);
}

static void (*const operations[])(struct arena *, long, long) = {
    write_pages, zero_pages, map_anonymous, map_shared, map_file, unmap,         drop, free_pages, protect,
    guard,       advise,     lock,          move,       move_and_keep, grow, shrink, collapse};
enum { WRITE, ZERO, MAP, SHARE, COPY, UNMAP, DROP, FREE, PROTECT, GUARD, ADVISE, LOCK, MOVE, KEEP, GROW, SHRINK, FOLD };

static void anything(long me) {
  struct arena *a = &arenas[me];
  for (int n = 0; n < 8; n++) {
    long count = 1 + (long)any(&a->random, any(&a->random, 16) ? MOST : most_pages);
    long from = any(&a->random, arena_pages - count + 1);
    holds(a, from, count);
    unsigned operation = any(&a->random, COUNT(operations));
    if (any(&a->random, calm ? 16 : 3) < (calm ? 15 : 1))
      operation = WRITE;
    if (!(mask >> operation & 1))
      continue;
    operations[operation](a, from, count);
    a->done[operation]++;
    holds(a, from, count);
  }
  if (calm)
    nap(0.002);
}

static void (*const both[])(long) = {anything, anything};
static void (*const only_one[])(long) = {anything};

// Places where nothing is come to where pages were, and nothing else moves: every second page of the second arena is never touched.
static void overlay(long unused) {
  (void)unused;
  struct arena *a = &arenas[0], *none = &arenas[1];
  for (int n = 0; n < 8; n++) {
    long to = any(&a->random, arena_pages), from = any(&a->random, arena_pages / 2) * 2;
    holds(a, to, 1);
    MUST(mremap(address(none, from), PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, address(a, to)) ==
         address(a, to));
    become(a, to, 1, ANON);
    for (int k = 0; k < 3; k++)
      write_pages(a, any(&a->random, arena_pages), 1);
    holds(a, any(&a->random, arena_pages - 32), 32);
  }
}

static void (*const only_overlay[])(long) = {overlay};

static volatile int *over; // by all processes
static pid_t heirs[3];
static int families;

// Goes on by itself with what it has from its parent; the last one has it from another.
static void go_on(int n) {
  if (n == 1)
    heirs[2] = fork();
  MUST(heirs[2] >= 0);
  int me = n == 1 && !heirs[2] ? 2 : n;
  MUST(!prctl(PR_SET_PDEATHSIG, SIGKILL));
  for (int i = 0; i < 2; i++)
    arenas[i].random = mix(1000 * me + i) >> 8;
  while (!*over) {
    anything(0);
    // Most of the other one remains in common for a while.
    if (!any(&arenas[0].random, 100))
      anything(1);
    breathe();
  }
  for (int i = 0; i < 2; i++)
    holds(&arenas[i], 0, arena_pages);
  if (me == 1) {
    int status = -1;
    MUST(waitpid(heirs[2], &status, 0) == heirs[2]);
    EQUAL(status, 0);
  }
  _exit(failures ? 1 : 0);
}

static void run_arenas(void) {
  pattern = open(path_of("pattern"), O_RDWR | O_CREAT | O_TRUNC, 0600);
  char *data = map_anon(arena_pages * PAGE);
  fill(data, arena_pages * PAGE, FILE_SEED);
  MUST(pattern >= 0 && write(pattern, data, arena_pages * PAGE) == (ssize_t)(arena_pages * PAGE));
  munmap(data, arena_pages * PAGE);
  for (int i = 0; i < 2; i++) {
    struct arena *a = &arenas[i];
    // Around each arena is room that nothing else gets, and no other thread maps anything where it pleases.
    char *room = mmap(0, 3 * arena_pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MUST(room != MAP_FAILED);
    a->at = (char *)(((uintptr_t)room + 2 * MIB - 1) & ~(2 * MIB - 1));
    a->pages = map_anon(arena_pages * sizeof *a->pages);
    a->random = mix(i + 77) >> 8;
    a->seed = 1;
    map_new(a, 0, arena_pages, ANON);
    for (long page = 0; page < arena_pages; page++)
      if (!untouched || i == 0 || page % untouched)
        write_pages(a, page, 1);
  }
  over = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  MUST(over != MAP_FAILED);
  for (int i = 0; i < families; i++) {
    heirs[i] = fork();
    MUST(heirs[i] >= 0);
    if (!heirs[i])
      go_on(i);
  }
  if (families)
    together(only_one, 1);
  else if (untouched)
    together(only_overlay, 1);
  else
    together(both, 2);
  *over = 1;
  for (int i = 0; i < families; i++) {
    int status = -1;
    MUST(waitpid(heirs[i], &status, 0) == heirs[i]);
    EQUAL(status, 0);
  }
  for (int i = 0; i < 2; i++)
    holds(&arenas[i], 0, arena_pages);
}

#define BIT(operation) (1u << (operation))

static void moves(void) {
  mask = BIT(WRITE) | BIT(MAP) | BIT(MOVE) | BIT(KEEP) | BIT(GROW) | BIT(SHRINK);
  run_arenas();
}

static void overlaid(void) {
  arena_pages = 4096;
  untouched = 2;
  run_arenas();
}

static void drops(void) {
  mask = BIT(WRITE) | BIT(ZERO) | BIT(DROP) | BIT(FREE) | BIT(ADVISE) | BIT(COPY) | BIT(SHARE) | BIT(MAP);
  run_arenas();
}

static void replacements(void) {
  mask = BIT(WRITE) | BIT(MAP) | BIT(SHARE) | BIT(COPY) | BIT(UNMAP);
  run_arenas();
}

// A page of zeros means nothing in anonymous memory, and something in the copy of a file that has just taken its place.
static void zeros(void) {
  most_pages = 4 * MOST;
  mask = BIT(ZERO) | BIT(MAP) | BIT(COPY);
  run_arenas();
}

static void protections(void) {
  mask = BIT(WRITE) | BIT(PROTECT) | BIT(DROP) | BIT(GUARD) | BIT(LOCK) | BIT(MAP);
  run_arenas();
}

static void collapses(void) {
  mask = BIT(WRITE) | BIT(FOLD) | BIT(DROP) | BIT(PROTECT);
  run_arenas();
}

// Much that stays as it is, so that it pays to look at what was written only.
static void wide(void) {
  arena_pages = 8192;
  most_pages = MOST;
  calm = 1;
  mask = BIT(WRITE) | BIT(ZERO) | BIT(DROP) | BIT(FREE) | BIT(GUARD) | BIT(PROTECT) | BIT(UNMAP) | BIT(MAP);
  run_arenas();
}

// In several processes, each with what it has in common with the others and what has become of it.
static void inherited(void) {
  arena_pages = 2048;
  most_pages = MOST;
  calm = 1;
  families = 2;
  mask = BIT(WRITE) | BIT(ZERO) | BIT(DROP) | BIT(GUARD) | BIT(PROTECT) | BIT(UNMAP) | BIT(MAP) | BIT(MOVE) | BIT(GROW) | BIT(SHRINK);
  run_arenas();
}

static void everything(void) {
  mask = ~0u;
  run_arenas();
}

static void (*const growers[])(long) = {grow_one, grow_one};

static void grows(void) {
  growing_flags = MAP_PRIVATE;
  together(growers, 2);
}

static void no_more_of_them(void) { // as many as a process may have
  int most = 0;
  FILE *f = fopen("/proc/sys/vm/max_map_count", "r");
  MUST(f && fscanf(f, "%d", &most) == 1);
  fclose(f);
  char *all = mmap(0, (size_t)most * 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  MUST(all != MAP_FAILED);
  size_t n = 0;
  while (mprotect(all + n * 8192, 4096, PROT_READ | PROT_WRITE) == 0)
    n++;
  all[0] = 1;
  cut();
  EQUAL(all[0], 1);
}

SCENARIOS({"no_more_of_them", no_more_of_them}, {"moves", moves}, {"overlaid", overlaid}, {"drops", drops}, {"replacements", replacements}, {"zeros", zeros}, {"protections", protections},
          {"collapses", collapses}, {"grows", grows}, {"wide", wide}, {"inherited", inherited}, {"everything", everything})
