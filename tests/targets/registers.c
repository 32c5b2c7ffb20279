// Registers: threads that hold known values in every register across the cut, and look at all of them afterwards.
#include "target.h"
#include "hold.h"

static void *gpr_thread(void *argument) {
  long wrong = hold_general(&hold_stop, (long)argument);
  EQUAL(wrong, (long)argument << 16); // a bit for each wrong register, and the direction flag
  return 0;
}

static void general(void) {
  pthread_t t[2];
  for (long i = 0; i < 2; i++)
    t[i] = spawn(gpr_thread, (void *)i); // with the direction flag clear, and set
  nap(0.02);
  cut();
  hold_stop = 1;
  for (int i = 0; i < 2; i++)
    pthread_join(t[i], 0);
}

static void *vector_thread(void *kind) {
  struct vectors *want = aligned_alloc(64, sizeof *want), *got = aligned_alloc(64, sizeof *got);
  memset(got, 0, sizeof *got);
  fill(want, sizeof *want, (uint64_t)(uintptr_t)pthread_self());
  for (int i = 0; i < 8; i++)
    want->mask[i] &= hold_mask_bits();
  hold_vectors((long)kind, want, got, &hold_stop);
  size_t bytes = (long)kind == 0 ? 16 : (long)kind == 1 ? 32 : 64;
  for (int r = 0; r < ((long)kind == 2 ? 32 : 16); r++)
    for (size_t b = 0; b < bytes; b++)
      if (want->v[r][b] != got->v[r][b]) {
        say("vector register %d, byte %zu: %#x, expected %#x", r, b, got->v[r][b], want->v[r][b]);
        CHECK(!"vector register kept");
        break;
      }
  if ((long)kind == 2)
    for (int i = 0; i < 8; i++)
      EQUAL(got->mask[i], want->mask[i]);
  return 0;
}

static void vectors(long kind) {
  pthread_t t[3];
  for (int i = 0; i < 3; i++)
    t[i] = spawn(vector_thread, (void *)kind);
  nap(0.02);
  cut();
  hold_stop = 1;
  for (int i = 0; i < 3; i++)
    pthread_join(t[i], 0);
}

static void sse(void) {
  vectors(0);
}

static void avx(void) {
  if (!hold_has(1))
    SKIP("this processor has no AVX");
  vectors(1);
}

static void avx512(void) {
  if (!hold_has(2))
    SKIP("this processor has no AVX-512");
  vectors(2);
}

static void *x87_thread(void *unused) {
  unsigned char before[512] __attribute__((aligned(16))), after[512] __attribute__((aligned(16)));
  memset(before, 0, sizeof before);
  memset(after, 0, sizeof after);
  hold_x87(before, after, &hold_stop);
  EQUAL(*(uint16_t *)after, *(uint16_t *)before);                 // control word
  EQUAL(*(uint16_t *)(after + 2), *(uint16_t *)(before + 2));     // status word with the top of stack
  EQUAL(after[4], before[4]);                                     // tags
  EQUAL(*(uint32_t *)(after + 24), *(uint32_t *)(before + 24));   // MXCSR
  CHECK(!memcmp(before + 32, after + 32, 128));                   // st(0) to st(7)
  EQUAL(*(uint16_t *)after, 0x0e7f);
  EQUAL(*(uint32_t *)(after + 24), 0xffc0);
  return unused;
}

static void x87(void) {
  pthread_t t = spawn(x87_thread, 0);
  nap(0.02);
  cut();
  hold_stop = 1;
  pthread_join(t, 0);
}

// A thread that never used the FPU beside one that did: initial state stays initial, MXCSR default.
static void *fresh_thread(void *unused) {
  while (!hold_stop)
    sched_yield();
  uint32_t mxcsr = 0;
  uint16_t word = 0;
  __asm__ volatile("stmxcsr %0\n\tfnstcw %1" : "=m"(mxcsr), "=m"(word));
  EQUAL(mxcsr & ~0x3f, 0x1f80);
  EQUAL(word, 0x037f);
  return unused;
}

static void fresh(void) {
  pthread_t t = spawn(fresh_thread, 0);
  nap(0.02);
  cut();
  hold_stop = 1;
  pthread_join(t, 0);
}

// --- segment bases

static void *base_thread(void *argument) {
  uint64_t want = (uint64_t)(uintptr_t)argument, got = 0, fs = 0, fs_after = 0;
  MUST(syscall(SYS_arch_prctl, 0x1001, want) == 0); // ARCH_SET_GS
  syscall(SYS_arch_prctl, 0x1003, &fs);             // ARCH_GET_FS
  while (!hold_stop)
    nap(0.001);
  syscall(SYS_arch_prctl, 0x1004, &got);
  syscall(SYS_arch_prctl, 0x1003, &fs_after);
  EQUAL(got, want);
  EQUAL(fs_after, fs);
  uint64_t through = 0;
  __asm__ volatile("mov %%gs:8, %0" : "=r"(through));
  EQUAL(through, ((uint64_t *)want)[1]);
  return 0;
}

static void segment_bases(void) {
  static uint64_t words[4][2] = {{1, 11}, {2, 22}, {3, 33}, {4, 44}};
  pthread_t t[4];
  for (int i = 0; i < 4; i++)
    t[i] = spawn(base_thread, words[i]);
  nap(0.02);
  cut();
  hold_stop = 1;
  for (int i = 0; i < 4; i++)
    pthread_join(t[i], 0);
}

// --- memory below the stack pointer

static void *red_zone_thread(void *unused) {
  EQUAL(hold_red_zone(&hold_stop), 0);
  return unused;
}

static void red_zone(void) {
  pthread_t t[2];
  for (int i = 0; i < 2; i++)
    t[i] = spawn(red_zone_thread, 0);
  nap(0.02);
  cut();
  hold_stop = 1;
  for (int i = 0; i < 2; i++)
    pthread_join(t[i], 0);
}

// Runtimes with small stacks of their own (Go, coroutines) have live data close below a stack pointer: nothing there
// may change, and nothing may be needed there.
static unsigned char *arena;

static volatile int arrived;

static void *small_stack_thread(void *unused) {
  arrived = 1;
  hold_small_stack(arena + 8192 + 256, &hold_stop);
  return unused;
}

static void small_stack(void) {
  arena = map_anon(16384);
  fill(arena, 8192, 5);
  pthread_t t = spawn(small_stack_thread, 0);
  while (!arrived)
    nap(0.001);
  nap(0.02);
  cut();
  CHECK(filled(arena, 8192, 5));
  hold_stop = 1;
  pthread_join(t, 0);
  CHECK(filled(arena, 8192, 5));
}

// The stack pointer is a number like any other for a moment: no memory there at all.
static void *no_stack_thread(void *unused) {
  arrived = 1;
  EQUAL(hold_no_stack(0x1230, &hold_stop), 0x1230);
  return unused;
}

static void no_stack(void) {
  pthread_t t = spawn(no_stack_thread, 0);
  while (!arrived)
    nap(0.001);
  nap(0.02);
  cut();
  hold_stop = 1;
  pthread_join(t, 0);
}

// --- tiles (AMX), for which a process asks leave and each thread gets room when it first uses them

#define TILES 8
#define TILE 1024

struct tiles {
  unsigned char want[TILES * TILE], got[TILES * TILE];
  int pipe[2];
};

#define EACH_TILE(does) does(0) does(1) does(2) does(3) does(4) does(5) does(6) does(7)
#define LOAD_TILE(n) "tileloadd " #n "*1024(%[want], %[stride], 1), %%tmm" #n "\n"
#define STORE_TILE(n) "tilestored %%tmm" #n ", " #n "*1024(%[got], %[stride], 1)\n"

// Holds values in all tiles, computing or in a call that blocks, until it is told to look at them.
static void *tile_thread(void *argument) {
  struct tiles *t = argument;
  unsigned char config[64] = {1}, byte;
  for (int i = 0; i < TILES; i++)
    config[16 + 2 * i] = 64, config[48 + i] = 16;
  fill(t->want, sizeof t->want, (uintptr_t)t);
  if (!t->pipe[1])
    __asm__ volatile("ldtilecfg (%[config])\n" EACH_TILE(LOAD_TILE) "1: pause\n cmpl $0, (%[stop])\n je 1b\n" EACH_TILE(STORE_TILE) "tilerelease"
                     :
                     : [config] "r"(config), [want] "r"(t->want), [got] "r"(t->got), [stride] "r"(64l), [stop] "r"(&hold_stop)
                     : "memory", "cc");
  else {
    long read_it = SYS_read;
    __asm__ volatile("ldtilecfg (%[config])\n" EACH_TILE(LOAD_TILE) "syscall\n" EACH_TILE(STORE_TILE) "tilerelease"
                     : "+a"(read_it)
                     : [config] "r"(config), [want] "r"(t->want), [got] "r"(t->got), [stride] "r"(64l), "D"((long)t->pipe[0]),
                       "S"(&byte), "d"(1l)
                     : "memory", "cc", "rcx", "r11");
    EQUAL(read_it, 1);
  }
  CHECK(!memcmp(t->want, t->got, sizeof t->got));
  return 0;
}

static void tiles(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA))
    SKIP("this processor or kernel has no AMX");
  static struct tiles all[3];
  MUST(!pipe(all[2].pipe));
  pthread_t threads[3];
  for (int i = 0; i < 3; i++)
    threads[i] = spawn(tile_thread, &all[i]);
  nap(0.02);
  cut();
  hold_stop = 1;
  EQUAL(write(all[2].pipe[1], "x", 1), 1);
  for (int i = 0; i < 3; i++)
    pthread_join(threads[i], 0);
}

SCENARIOS({"general", general}, {"tiles", tiles}, {"sse", sse}, {"avx", avx}, {"avx512", avx512}, {"x87", x87}, {"fresh", fresh},
          {"segment_bases", segment_bases}, {"red_zone", red_zone}, {"small_stack", small_stack},
          {"no_stack", no_stack})
