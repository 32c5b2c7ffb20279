// A program with threads that takes snapshots of itself, does what it can to spoil everything, and goes back: again and again.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <stillpoint.h>

#define MUST(x) \
  do \
    if (!(x)) { \
      fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); \
      _exit(1); \
    } \
  while (0)

#define WORKERS 4

static pthread_mutex_t kinds[WORKERS], both = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static volatile long counted[WORKERS], beside[WORKERS], turn, over;
static __thread long mine;

static void *work(void *which) {
  long me = (long)which;
  while (!over) {
    MUST(!pthread_mutex_lock(&kinds[me]));
    counted[me]++;
    char *block = malloc(100 + counted[me] % 5000);
    memset(block, (int)me, 100);
    beside[me]++;
    mine++;
    MUST(counted[me] == beside[me] && mine == counted[me] && block[99] == me);
    free(block);
    MUST(!pthread_mutex_unlock(&kinds[me]));
    // In turns, two and two.
    MUST(!pthread_mutex_lock(&both));
    if (turn % 2 == me % 2) {
      turn++;
      pthread_cond_broadcast(&turned);
    } else {
      struct timespec soon;
      clock_gettime(CLOCK_REALTIME, &soon);
      soon.tv_nsec += 1000000;
      if (soon.tv_nsec >= 1000000000)
        soon.tv_sec++, soon.tv_nsec -= 1000000000;
      pthread_cond_timedwait(&turned, &both, &soon);
    }
    MUST(!pthread_mutex_unlock(&both));
  }
  return (void *)mine;
}

static void *brief(void *unused) {
  usleep(300);
  return unused;
}

static int listed(const char *folder) {
  DIR *d = opendir(folder);
  int n = 0;
  MUST(d);
  while (readdir(d))
    n++;
  closedir(d);
  return n;
}

static long resident(void) {
  long pages = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  MUST(f && fscanf(f, "%*s %ld", &pages) == 1);
  fclose(f);
  return pages;
}

static int caught;
static void on_signal(int s) {
  caught = s;
}

int main(int argc, char **argv) {
  int turns = argc > 1 ? atoi(argv[1]) : 30;
  int types[WORKERS] = {PTHREAD_MUTEX_NORMAL, PTHREAD_MUTEX_RECURSIVE, PTHREAD_MUTEX_ERRORCHECK, PTHREAD_MUTEX_NORMAL};
  pthread_t workers[WORKERS];
  for (long i = 0; i < WORKERS; i++) {
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_settype(&a, types[i]);
    if (i == 3)
      pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    MUST(!pthread_mutex_init(&kinds[i], &a));
    MUST(!pthread_create(&workers[i], 0, work, (void *)i));
  }
  int ends[2], counter = eventfd(5, EFD_NONBLOCK), file = open("branching.file", O_RDWR | O_CREAT | O_TRUNC, 0600);
  int again = fcntl(counter, F_DUPFD_CLOEXEC, 100); // one thing under two numbers
  MUST(!pipe(ends) && again >= 0 && counter >= 0 && file >= 0 && write(ends[1], "in the pipe", 11) == 11);
  MUST(write(file, "0123456789", 10) == 10 && lseek(file, 3, SEEK_SET) == 3);
  char *region = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *heap = malloc(300000);
  memset(region, 1, 1 << 20);
  memset(heap, 2, 300000);
  signal(SIGUSR1, SIG_DFL);
  int open_before = 0, threads_before = 0;
  long resident_before = 0;
  for (int i = 0; i < turns; i++) {
    uint64_t here = 0;
    errno = 0;
    int came = sp_snapshot(&here);
    if (came < 0) {
      fprintf(stderr, "snapshot: %s\n", sp_strerror(came));
      return 1;
    }
    if (came == 0) {
      if (i == 0)
        open_before = listed("/proc/self/fd"), threads_before = listed("/proc/self/task");
      char buf[64];
      MUST(read(ends[0], buf, 11) == 11 && read(counter, buf, 8) == 8 && read(file, buf, 4) == 4);
      switch (i % 6) {
      case 0:
        close(ends[0]), close(ends[1]), close(counter);
        fcntl(again, F_SETFD, 0);
        open("/dev/null", O_RDONLY);
        break;
      case 1:
        munmap(region, 1 << 20);
        close(file);
        break;
      case 2:
        memset(region, 77, 1 << 20);
        mprotect(region, 1 << 19, PROT_NONE);
        signal(SIGUSR1, on_signal);
        break;
      case 3: { // threads that come and go
        pthread_t more[3];
        for (int k = 0; k < 3; k++)
          MUST(!pthread_create(&more[k], 0, brief, 0));
        MUST(!pthread_join(more[0], 0));
        break;
      }
      case 4: // a thread that was there ends
        over = 1;
        MUST(!pthread_join(workers[0], 0) && !pthread_join(workers[1], 0));
        break;
      default:
        free(heap);
        for (int k = 0; k < 200; k++)
          memset(malloc(5000 * (size_t)k + 1), k, 5000 * (size_t)k + 1);
        chdir("/");
        dup2(ends[0], counter);
      }
      if (i % 6 != 4)
        usleep(1000);
      int failed = sp_rollback(here, 40 + i);
      fprintf(stderr, "turn %d: rollback: %s\n", i, sp_strerror(failed));
      return 1;
    }
    MUST(came == 40 + i && !over && !caught);
    char buf[64] = {0};
    MUST(read(ends[0], buf, 64) == 11 && !memcmp(buf, "in the pipe", 11) && write(ends[1], "in the pipe", 11) == 11);
    uint64_t count = 0, five = 5;
    MUST(read(counter, &count, 8) == 8 && count == 5 && write(counter, &five, 8) == 8);
    MUST(fcntl(again, F_GETFD) == FD_CLOEXEC);
    MUST(lseek(file, 0, SEEK_CUR) == 3 && read(file, buf, 1) == 1 && buf[0] == '3' && lseek(file, 3, SEEK_SET) == 3);
    for (int k = 0; k < 1 << 20; k += 1000)
      MUST(region[k] == 1 && heap[k % 300000] == 2);
    region[5] = 1;
    struct sigaction action;
    sigaction(SIGUSR1, 0, &action);
    MUST(action.sa_handler == SIG_DFL);
    MUST(listed("/proc/self/task") == threads_before || !threads_before);
    MUST(sp_commit(here) == 0);
    MUST(sp_commit(here) == SP_ENOENT && sp_rollback(here, 1) < 0 && sp_rollback(here, 0) == SP_EINVAL);
    if (i == 12)
      resident_before = resident(), open_before = listed("/proc/self/fd");
    if (i > 12) // nothing piles up
      MUST(resident() < resident_before + 4000 && listed("/proc/self/fd") == open_before);
  }
  over = 1;
  long sum = 0;
  for (int i = 0; i < WORKERS; i++) {
    void *own;
    MUST(!pthread_join(workers[i], &own) && (long)own == counted[i] && counted[i] == beside[i]);
    sum += counted[i];
  }
  MUST(sum > 0 && waitpid(-1, 0, WNOHANG) < 0 && errno == ECHILD);
  puts("ok");
  return 0;
}
