/* Writers beside checkpoints: ours, and copy-on-write by mprotect, userfaultfd and fork.
 *
 *   realtime writes MODE RUNS FILE       ms of 16,384 writes, one to each page of 64 MiB
 *   realtime periodic MODE PERIOD_US SAMPLES FILE   a task of 24 MiB: its time and its wake-up latency, microseconds
 *   realtime cycle RUNS FILE             ms of cycles of 64 MiB: all dirty, 1 % dirty
 *
 * Modes: plain, attached (no checkpoint), checkpoint (during one), remap, mprotect, userfaultfd, fork. Lines are `key value`. */
#define _GNU_SOURCE
#include "stillpoint_mirror.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };
#define MIB ((size_t)1 << 20)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void die(const char *what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(2);
}

/* A real-time priority for this thread, where that is allowed; the tables of cards are only locked as far as they are used. */
static void real_time(void) {
  struct sched_param high = {.sched_priority = 60};
  int fifo = sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &high) == 0;
  int locked = mlockall(MCL_CURRENT | MCL_ONFAULT) == 0;
  printf("fifo %d\nlocked %d\n", fifo, locked);
}

static char *open_region(size_t size, const char *file, int remap) {
  if (file)
    unlink(file);
  struct stillpoint_mirror_options options = {.size = size + 2 * MIB, .file = file, .remap = remap, .lock = 1, .nice = 10};
  char why[512];
  if (stillpoint_mirror_open(&options, why, sizeof why) < 0) {
    fprintf(stderr, "%s\n", why);
    exit(2);
  }
  char *at = stillpoint_mirror_aligned_alloc(PAGE, size);
  if (!at)
    die("no room");
  return at;
}

static int phase(void) {
  struct stillpoint_mirror_stats stats;
  stillpoint_mirror_stats(&stats);
  return stats.phase;
}

static void settle(void) {
  while (phase() != STILLPOINT_MIRROR_ATTACHED)
    usleep(200);
}

/* The second store is compiled into this loop (mirror-cc); without a mirror it repeats the first. */
__attribute__((noinline)) static void write_pages(char *at, size_t size, long value) {
  for (size_t o = 0; o < size; o += PAGE)
    *(long *)(at + o) = value;
}

static char *caught;
static void unprotect(int signal, siginfo_t *information, void *context) {
  (void)signal, (void)context;
  static char copy[PAGE];
  char *page = (char *)((size_t)information->si_addr & ~(size_t)(PAGE - 1));
  memcpy(copy, page, PAGE); /* what is to be saved */
  caught = page;
  mprotect(page, PAGE, PROT_READ | PROT_WRITE);
}

static int faults;
static size_t ranged;
static void *handler(void *argument) {
  static char copy[PAGE];
  (void)argument;
  struct uffd_msg message;
  while (read(faults, &message, sizeof message) == sizeof message) {
    size_t page = message.arg.pagefault.address & ~(size_t)(PAGE - 1);
    memcpy(copy, (char *)page, PAGE);
    struct uffdio_writeprotect release = {{page, PAGE}, 0};
    ioctl(faults, UFFDIO_WRITEPROTECT, &release);
  }
  return NULL;
}

static void writes(const char *mode, int runs, const char *file) {
  size_t size = 64 * MIB;
  int mirrored = !strcmp(mode, "attached") || !strcmp(mode, "checkpoint") || !strcmp(mode, "remap");
  char *at = mirrored ? open_region(size, file, !strcmp(mode, "remap"))
                      : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (at == MAP_FAILED)
    die("mmap");
  madvise(at, size, MADV_NOHUGEPAGE);
  if (!strcmp(mode, "mprotect")) {
    struct sigaction action = {.sa_sigaction = unprotect, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
  }
  if (!strcmp(mode, "userfaultfd")) {
    faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP};
    struct uffdio_register range = {.range = {(size_t)at, size}, .mode = UFFDIO_REGISTER_MODE_WP};
    if (faults < 0 || ioctl(faults, UFFDIO_API, &api) || ioctl(faults, UFFDIO_REGISTER, &range))
      die("userfaultfd");
    pthread_t thread;
    pthread_create(&thread, NULL, handler, NULL);
    ranged = size;
  }
  real_time();
  for (int run = 0; run < runs + 2; run++) {
    write_pages(at, size, run);
    if (mirrored)
      settle();
    pid_t child = 0;
    if (!strcmp(mode, "checkpoint") || !strcmp(mode, "remap")) {
      if (stillpoint_mirror_checkpoint() < 0)
        die("a checkpoint was being taken");
      /* In the middle of it: the writing. */
      while (phase() == STILLPOINT_MIRROR_CUTTING)
        usleep(50);
    } else if (!strcmp(mode, "attached") || !strcmp(mode, "plain")) {
      usleep(300); /* as long as the others wait: nothing is in the first caches any more */
    } else if (!strcmp(mode, "mprotect")) {
      mprotect(at, size, PROT_READ);
    } else if (!strcmp(mode, "userfaultfd")) {
      struct uffdio_writeprotect protect = {{(size_t)at, size}, UFFDIO_WRITEPROTECT_MODE_WP};
      if (ioctl(faults, UFFDIO_WRITEPROTECT, &protect))
        die("UFFDIO_WRITEPROTECT");
    } else if (!strcmp(mode, "fork")) {
      child = fork();
      if (child == 0) {
        pause();
        _exit(0);
      }
    }
    double begin = now();
    write_pages(at, size, run + 1000);
    double took = now() - begin;
    int during = mirrored ? phase() : 0;
    if (child) {
      kill(child, SIGKILL);
      waitpid(child, NULL, 0);
    }
    if (run >= 2)
      printf("ms %.4f\nphase %d\n", took, during);
    usleep(2000);
  }
}

__attribute__((noinline)) static unsigned long task(char *at, size_t size, unsigned long seed, int count) {
  for (int i = 0; i < count; i++) {
    seed = seed * 6364136223846793005ul + 1442695040888963407ul;
    unsigned long *word = (unsigned long *)(at + (seed >> 20) % (size / 8) * 8);
    *word = *word * 3 + seed;
  }
  return seed;
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static void tell(const char *what, double *values, int count) {
  qsort(values, (size_t)count, sizeof *values, compare);
  const double parts[] = {0.5, 0.9, 0.99, 0.999};
  const char *names[] = {"50", "90", "99", "99.9"};
  for (int i = 0; i < 4; i++)
    printf("%s_%s %.2f\n", what, names[i], values[(int)(parts[i] * (count - 1))]);
  printf("%s_max %.2f\n", what, values[count - 1]);
}

static void periodic(const char *mode, long period_us, int samples, const char *file) {
  size_t size = 24 * MIB;
  int plain = !strcmp(mode, "plain");
  char *at = plain ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0)
                   : open_region(size, file, 0);
  double *times = calloc((size_t)samples, sizeof *times), *late = calloc((size_t)samples, sizeof *late);
  memset(at, 1, size);
  real_time();
  int count = period_us < 10000 ? 2000 : 20000;
  unsigned long seed = task(at, size, 7, 10 * count);
  if (!strcmp(mode, "checkpoint"))
    stillpoint_mirror_every(1);
  struct timespec due;
  clock_gettime(CLOCK_MONOTONIC, &due);
  for (int i = -20; i < samples; i++) {
    due.tv_nsec += period_us * 1000;
    for (; due.tv_nsec >= 1000000000; due.tv_nsec -= 1000000000)
      due.tv_sec++;
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
    double begin = now();
    seed = task(at, size, seed, count);
    double end = now();
    if (i >= 0) {
      times[i] = (end - begin) * 1e3;
      late[i] = (begin - ((double)due.tv_sec * 1e3 + (double)due.tv_nsec / 1e6)) * 1e3;
    }
  }
  if (!plain) {
    stillpoint_mirror_every(0);
    struct stillpoint_mirror_stats stats;
    stillpoint_mirror_stats(&stats);
    printf("checkpoints %lu\noverhead %.4f\n", (unsigned long)stats.complete, stats.overhead);
  }
  tell("time", times, samples);
  tell("late", late, samples);
  printf("seed %lu\n", seed);
}

static double cycle(void) {
  double begin = now();
  int64_t number = stillpoint_mirror_checkpoint();
  if (number < 0 || stillpoint_mirror_wait(number) != 0)
    die("a checkpoint failed");
  return now() - begin;
}

static void cycles(int runs, const char *file) {
  size_t size = 64 * MIB;
  char *at = open_region(size, file, 0);
  struct stillpoint_mirror_stats stats;
  for (int run = -2; run < runs; run++) {
    settle();
    write_pages(at, size, run);
    double full = cycle();
    settle();
    cycle(); /* the other image has them, too, now */
    for (int half = 0; half < 2; half++) {
      /* 1 % of the pages, scattered; the first time is not counted: with it comes the last 1 % of the other image. */
      settle();
      for (size_t o = (size_t)(run + 2) * 7 * PAGE; o < size; o += 100 * PAGE)
        *(long *)(at + o) = run + half;
      double little = cycle();
      stillpoint_mirror_stats(&stats);
      if (run >= 0 && half == 1)
        printf("full %.4f\nlittle %.4f\nbytes %lu\ncut %.4f\nwrite %.4f\nresync %.4f\n", full, little,
               (unsigned long)stats.last_bytes, (double)stats.last_cut_ns / 1e6, (double)stats.last_write_ns / 1e6,
               (double)stats.last_resync_ns / 1e6);
    }
  }
}

int main(int argc, char **argv) {
  if (argc == 5 && !strcmp(argv[1], "writes"))
    writes(argv[2], atoi(argv[3]), argv[4]);
  else if (argc == 6 && !strcmp(argv[1], "periodic"))
    periodic(argv[2], atol(argv[3]), atoi(argv[4]), argv[5]);
  else if (argc == 4 && !strcmp(argv[1], "cycle"))
    cycles(atoi(argv[2]), argv[3]);
  else
    return 1;
  return 0;
}
