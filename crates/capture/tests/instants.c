// instants [STORMS]: threads that keep invariants across pages at every instant. Prints the address of its notes and
// goes on for ever. STORMS is a word with letters: d drops pages, m maps and unmaps, r moves, t makes threads.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define WORDS 512
#define COUNTERS 3000
#define DROPPED 256
#define MAPPED 64

// A region whose pages all begin with `value` while `whole` is set; with `value` or 0 otherwise.
struct region {
  volatile uint64_t whole, value, address, pages;
};

// What the test reads, at the printed address.
struct notes {
  uint64_t counters, count, stride;   // of page i * stride % count: never rises with i, and falls by at most 1
  uint64_t read, reads;               // the same with stride 1
  struct region regions[4];
};

static struct notes *notes;

static void *pages(size_t n) {
  return mmap(0, n * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void *count(void *unused) {
  volatile uint64_t *memory = (volatile uint64_t *)notes->counters;
  for (uint64_t round = 1;; round++) {
    for (uint64_t i = 0; i < notes->count; i++)
      memory[i * notes->stride % notes->count * WORDS] = round;
    usleep(300);
  }
  return unused;
}

// The kernel writes, on behalf of read(2).
static void *reader(void *unused) {
  int ends[2];
  if (pipe(ends))
    abort();
  for (uint64_t round = 1;; round++)
    for (uint64_t i = 0; i < notes->reads; i++) {
      uint64_t value = round;
      if (write(ends[1], &value, 8) != 8 || read(ends[0], (char *)notes->read + i * 4096, 8) != 8)
        abort();
      if (i % 64 == 0)
        usleep(100);
    }
  return unused;
}

static void fill(struct region *r, uint64_t value) {
  for (uint64_t i = 0; i < r->pages; i++)
    ((volatile uint64_t *)r->address)[i * WORDS] = value;
}

static void *dropper(void *unused) {
  struct region *r = &notes->regions[0];
  r->pages = DROPPED, r->address = (uint64_t)pages(DROPPED);
  for (uint64_t value = 1;; value++) {
    r->whole = 0;
    madvise((void *)r->address, DROPPED * 4096, MADV_DONTNEED);
    r->value = value;
    fill(r, value);
    r->whole = 1;
    usleep(2000);
  }
  return unused;
}

static void *mapper(void *unused) {
  struct region *r = &notes->regions[1];
  for (uint64_t value = 1;; value++) {
    r->value = value, r->pages = MAPPED, r->address = (uint64_t)pages(MAPPED);
    fill(r, value);
    r->whole = 1;
    usleep(2000);
    r->whole = 0;
    munmap((void *)r->address, MAPPED * 4096);
  }
  return unused;
}

static void *mover(void *unused) {
  struct region *r = &notes->regions[2];
  r->address = (uint64_t)pages(MAPPED);
  for (uint64_t value = 1;; value++) {
    r->value = value, r->pages = MAPPED;
    fill(r, value);
    r->whole = 1;
    usleep(2000);
    r->whole = 0;
    char *place = pages(2 * MAPPED);
    r->address = (uint64_t)mremap((void *)r->address, MAPPED * 4096, 2 * MAPPED * 4096, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    r->pages = 2 * MAPPED, r->value = value + 1;
    fill(r, ++value);
    r->whole = 1;
    usleep(2000);
    r->whole = 0;
    mremap((void *)r->address, 2 * MAPPED * 4096, MAPPED * 4096, 0);
  }
  return unused;
}

static void *short_lived(void *unused) {
  volatile char stack[65536];
  memset((void *)stack, 1, sizeof stack);
  return unused;
}

static void *maker(void *unused) {
  for (;;) {
    pthread_t t;
    if (!pthread_create(&t, 0, short_lived, 0))
      pthread_join(t, 0);
    usleep(3000);
  }
  return unused;
}

int main(int argc, char **argv) {
  const char *storms = argc > 1 ? argv[1] : "";
  notes = pages(1);
  notes->count = COUNTERS, notes->stride = 1777, notes->counters = (uint64_t)pages(COUNTERS);
  notes->reads = 500, notes->read = (uint64_t)pages(500);
  // Much that is never written, before and behind, in reach of a sweep.
  memset(pages(8192), 7, 8192l * 4096);
  pages(1 << 24);
  pthread_t t;
  pthread_create(&t, 0, count, 0);
  pthread_create(&t, 0, reader, 0);
  if (strchr(storms, 'd'))
    pthread_create(&t, 0, dropper, 0);
  if (strchr(storms, 'm'))
    pthread_create(&t, 0, mapper, 0);
  if (strchr(storms, 'r'))
    pthread_create(&t, 0, mover, 0);
  if (strchr(storms, 't'))
    pthread_create(&t, 0, maker, 0);
  printf("%lu\n", (unsigned long)notes);
  fflush(stdout);
  for (;;)
    pause();
}
