// Pages of other kinds: huge, locked, on a swap device, merged with others; and memory that is given back step by step.
#include "hostile.h"

static struct cells cells[2];

static void grow_cells(long me) {
  cells_grow(&cells[me], 400);
  if (rounds[me] % 16 == 0)
    cells_hold(&cells[me]);
}

static void (*const both_grow[])(long) = {grow_cells, grow_cells};

static void finish_cells(void) {
  for (int i = 0; i < 2; i++)
    cells_hold(&cells[i]);
}

static char *aligned(size_t bytes) {
  char *p = map_anon(bytes + 2 * MIB);
  return (char *)(((uintptr_t)p + 2 * MIB - 1) & ~(2 * MIB - 1));
}

// Gives some of it back, or changes its protection for a moment, so that huge pages are split; and makes them whole again.
static void grow_and_split(long me) {
  struct cells *c = &cells[me];
  grow_cells(me);
  if (rounds[me] % 4)
    return;
  size_t first = any(&c->seed, c->words / WORDS - 8) * WORDS;
  switch (any(&c->seed, 3)) {
  case 0:
    c->sum -= sum_of(c->at + first, 8 * WORDS);
    EQUAL(madvise((void *)(c->at + first), 8 * PAGE, MADV_DONTNEED), 0);
    break;
  case 1:
    EQUAL(mprotect((void *)(c->at + first), 8 * PAGE, PROT_READ), 0);
    EQUAL(mprotect((void *)(c->at + first), 8 * PAGE, PROT_READ | PROT_WRITE), 0);
    break;
  default:
    madvise((void *)((uintptr_t)(c->at + first) & ~(2 * MIB - 1)), 2 * MIB, 25 /* MADV_COLLAPSE */);
  }
}

static void transparent(void) {
  for (int i = 0; i < 2; i++) {
    char *p = aligned(6 * MIB);
    if (madvise(p, 6 * MIB, MADV_HUGEPAGE))
      SKIP("no transparent huge pages here");
    memset(p, 1, 6 * MIB);
    cells[i] = cells_in(p, 6 * MIB, i);
  }
  void (*const both[])(long) = {grow_and_split, grow_cells};
  together(both, 2);
  finish_cells();
}

static void hugetlb(void) {
  for (int i = 0; i < 2; i++) {
    char *p = mmap(0, 4 * MIB, PROT_READ | PROT_WRITE,
                   (i ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS | 0x40000 /* MAP_HUGETLB */, -1, 0);
    if (p == MAP_FAILED)
      SKIP("no huge pages are set aside here (vm.nr_hugepages)");
    cells[i] = cells_in(p, 4 * MIB, i);
  }
  together(both_grow, 2);
  finish_cells();
}

static void grow_and_lock(long me) {
  struct cells *c = &cells[me];
  grow_cells(me);
  if (rounds[me] % 8 == 0)
    munlock((void *)c->at, c->words * 8);
  else if (rounds[me] % 8 == 4)
    EQUAL(mlock((void *)c->at, c->words * 8), 0);
}

static void locked(void) {
  for (int i = 0; i < 2; i++) {
    char *p = map_anon(MIB);
    if (mlock(p, MIB))
      SKIP("not permitted to lock memory");
    cells[i] = cells_in(p, MIB, i);
  }
  void (*const both[])(long) = {grow_and_lock, grow_cells};
  together(both, 2);
  finish_cells();
}

static void grow_and_page_out(long me) {
  struct cells *c = &cells[me];
  cells_grow(c, 40);
  if (rounds[me] % 32 == 0)
    cells_hold(c);
  size_t part = MIB / 8, first = any(&c->seed, c->words / part) * part;
  madvise((void *)(c->at + first), MIB, MADV_PAGEOUT);
}

static void swapped(void) {
  char *swaps = contents("/proc/swaps", 0);
  if (!strchr(swaps, '/'))
    SKIP("no swap device is in use here");
  free(swaps);
  for (int i = 0; i < 2; i++) {
    char *p = mmap(0, 4 * MIB, PROT_READ | PROT_WRITE, (i ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS, -1, 0);
    MUST(p != MAP_FAILED);
    memset(p, 1, 4 * MIB);
    cells[i] = cells_in(p, 4 * MIB, i);
  }
  void (*const both[])(long) = {grow_and_page_out, grow_and_page_out};
  together(both, 2);
  finish_cells();
}

// Pages of few kinds, which the kernel makes one of where they are the same.
static struct slots alike;

static void write_alike(long me) {
  (void)me;
  for (int n = 0; n < 8; n++) {
    long i = any(&alike.random, alike.count);
    slots_hold(&alike, i, 1);
    alike.seed[i] = 1 + any(&alike.random, 3);
    fill(alike.at + i * PAGE, PAGE, alike.seed[i]);
  }
  nap(0.002);
}

static void merged(void) {
  alike = slots_in(map_anon(512 * PAGE), 512, 1);
  if (madvise(alike.at, 512 * PAGE, MADV_MERGEABLE))
    SKIP("this kernel merges no pages");
  for (long i = 0; i < alike.count; i++) {
    alike.seed[i] = 1 + i % 3;
    fill(alike.at + i * PAGE, PAGE, alike.seed[i]);
  }
  void (*const one[])(long) = {write_alike};
  together(one, 1);
  slots_hold(&alike, 0, alike.count);
}

// --- given back step by step; a checkpoint comes between any two steps

#define PART 32

static struct slots region;
static char *shared, *copy, *elsewhere;

static void zeros_from(long first, long count) {
  for (long i = first; i < first + count; i++)
    region.seed[i] = 0;
}

static void *part(long i) {
  return region.at + i * PART * PAGE;
}

static void await_step(int step) {
  char name[32];
  snprintf(name, sizeof name, "step.%d", step);
  while (access(path_of(name), F_OK) && !gone())
    nap(0.002);
}

static void check_region(int step) {
  slots_hold(&region, 0, region.count);
  for (long i = 0; i < PART; i++) {
    CHECK(step >= 5 && i < 16 ? all_zero(shared + i * PAGE, PAGE) : filled(shared + i * PAGE, PAGE, 5 + i * WORDS));
    CHECK(step >= 6 && i < 16 ? filled(copy + i * PAGE, PAGE, 7 + i * WORDS)
                              : filled(copy + i * PAGE, PAGE, 9 + i * WORDS));
  }
  if (step >= 4)
    CHECK(filled(elsewhere, PART * PAGE, 1 + 3 * PART * WORDS));
}

static void do_step(int step) {
  switch (step) {
  case 1: // dropped
    EQUAL(madvise(part(0), PART * PAGE, MADV_DONTNEED), 0);
    zeros_from(0, PART);
    break;
  case 2: // zeroed
    memset(part(1), 0, PART * PAGE);
    zeros_from(PART, PART);
    break;
  case 3: // unmapped and mapped again at the same place
    EQUAL(munmap(part(2), PART * PAGE), 0);
    CHECK(mmap(part(2), PART * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == part(2));
    zeros_from(2 * PART, PART);
    break;
  case 4: // moved away, and something new in its place
    elsewhere = mmap(0, PART * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mremap(part(3), PART * PAGE, PART * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, elsewhere) == elsewhere);
    CHECK(mmap(part(3), PART * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == part(3));
    zeros_from(3 * PART, PART);
    break;
  case 5: // a hole in shared memory
    EQUAL(madvise(shared, 16 * PAGE, MADV_REMOVE), 0);
    break;
  case 6: // private pages of a file given up: the file's again
    EQUAL(madvise(copy, 16 * PAGE, MADV_DONTNEED), 0);
    break;
  case 7: // nothing but what was there before: dropped once more, written as it was
    EQUAL(madvise(part(4), PART * PAGE, MADV_DONTNEED), 0);
    fill(part(4), PART * PAGE, 1 + 4 * PART * WORDS);
    break;
  case 8: // dropped, and one page of it written
    EQUAL(madvise(part(5), PART * PAGE, MADV_DONTNEED), 0);
    zeros_from(5 * PART, PART);
    region.seed[5 * PART + 7] = 4711;
    fill(region.at + (5 * PART + 7) * PAGE, PAGE, 4711);
    break;
  }
}

static void given_back(void) {
  region = slots_in(map_anon(8 * PART * PAGE), 8 * PART, 1);
  slots_fill(&region);
  shared = mmap(0, PART * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int fd = open(path_of("copied"), O_RDWR | O_CREAT | O_TRUNC, 0600);
  char *data = malloc(PART * PAGE);
  fill(data, PART * PAGE, 7);
  MUST(fd >= 0 && write(fd, data, PART * PAGE) == (ssize_t)(PART * PAGE));
  copy = mmap(0, PART * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  MUST(shared != MAP_FAILED && copy != MAP_FAILED);
  fill(shared, PART * PAGE, 5);
  fill(copy, PART * PAGE, 9);
  ready();
  int step = 0;
  for (;;) {
    await_step(step + 1);
    if (gone())
      break;
    do_step(++step);
    check_region(step);
    say("step %d", step);
  }
  check_region(step);
}

// --- much address space, little memory

#define GIB (1ul << 30)

static void sparse(void) {
  char *nothing = mmap(0, 64 * GIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char *p = mmap(0, 64 * GIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char *q = mmap(0, 16 * GIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (nothing == MAP_FAILED || p == MAP_FAILED || q == MAP_FAILED)
    SKIP("not enough address space here");
  for (uint64_t i = 0; i < 64; i++) {
    fill(p + mix(i) % (64 * GIB / PAGE) * PAGE, PAGE, i + 1);
    fill(q + mix(i) % (16 * GIB / PAGE) * PAGE, PAGE, i + 1);
  }
  ready();
  for (uint64_t next = 64; !gone() && next < 4000; next++, nap(0.002))
    *(uint64_t *)(p + mix(next % 64) % (64 * GIB / PAGE) * PAGE) = mix(next % 64 + 1); // the same again
  wait_go();
  for (uint64_t i = 0; i < 64; i++) {
    CHECK(filled(p + mix(i) % (64 * GIB / PAGE) * PAGE, PAGE, i + 1));
    CHECK(filled(q + mix(i) % (16 * GIB / PAGE) * PAGE, PAGE, i + 1));
    CHECK(all_zero(p + mix(i + 1000) % (64 * GIB / PAGE) * PAGE, PAGE));
    CHECK(all_zero(q + mix(i + 1000) % (16 * GIB / PAGE) * PAGE, PAGE));
  }
}

SCENARIOS({"transparent", transparent}, {"hugetlb", hugetlb}, {"locked", locked}, {"swapped", swapped},
          {"merged", merged}, {"given_back", given_back}, {"sparse", sparse})
