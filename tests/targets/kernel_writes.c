// Memory that the kernel writes: system calls into buffers, direct reads from disk, writes to memory files, futexes.
#include "hostile.h"
#include <sys/socket.h>
#include <sys/uio.h>

#define RUN 16 // pages that one call may write

static struct slots pages[2];
static char *sources[2]; // what is to be written
static int pipes[2][2], sockets[2][2], files[2], memory;

// How the contents of `source` come to `target`.
typedef void transfer(long me, char *source, char *target, size_t bytes);

static transfer *transfers[8];
static long transfer_count;

static void whole(ssize_t done, size_t bytes) {
  EQUAL(done, bytes);
}

// Calls until everything is there: a checkpoint may cut a call short, as any stop may.
static void read_all(int fd, char *target, size_t bytes) {
  while (bytes) {
    ssize_t n = read(fd, target, bytes);
    if (n <= 0) {
      if (n < 0 && errno == EINTR)
        continue;
      EQUAL(n, bytes);
      return;
    }
    target += n;
    bytes -= n;
  }
}

static void write_all(int fd, const char *source, size_t bytes) {
  while (bytes) {
    ssize_t n = write(fd, source, bytes);
    if (n <= 0) {
      if (n < 0 && errno == EINTR)
        continue;
      EQUAL(n, bytes);
      return;
    }
    source += n;
    bytes -= n;
  }
}

static void one_round(long me) {
  struct slots *s = &pages[me];
  long count = 1 + any(&s->random, RUN), from = any(&s->random, s->count - count + 1);
  uint64_t seed = s->random << 20 | 1;
  slots_hold(s, from, count);
  fill(sources[me], count * PAGE, seed);
  transfers[any(&s->random, transfer_count)](me, sources[me], s->at + from * PAGE, count * PAGE);
  for (long i = 0; i < count; i++)
    s->seed[from + i] = seed + i * WORDS;
  slots_hold(s, from, count);
}

static void (*const rounds_of_two[])(long) = {one_round, one_round};

static char *private_pages(long i) {
  (void)i;
  return map_anon(128 * PAGE);
}

static void run_with(transfer *const list[], long count, char *(*memory_of)(long)) {
  memcpy(transfers, list, count * sizeof *list);
  transfer_count = count;
  for (long i = 0; i < 2; i++) {
    pages[i] = slots_in(memory_of(i), 128, i);
    sources[i] = map_anon(RUN * PAGE);
  }
  together(rounds_of_two, 2);
  for (int i = 0; i < 2; i++)
    slots_hold(&pages[i], 0, pages[i].count);
}

// --- through pipes, sockets and files

static void by_pipe(long me, char *source, char *target, size_t bytes) {
  for (; bytes; bytes -= PAGE, source += PAGE, target += PAGE) {
    write_all(pipes[me][1], source, PAGE);
    read_all(pipes[me][0], target, PAGE);
  }
}

static void by_vmsplice(long me, char *source, char *target, size_t bytes) { // the pipe refers to the pages themselves
  for (; bytes; bytes -= PAGE, source += PAGE, target += PAGE) {
    struct iovec v = {source, PAGE};
    whole(vmsplice(pipes[me][1], &v, 1, 0), PAGE);
    read_all(pipes[me][0], target, PAGE);
  }
}

static void by_socket(long me, char *source, char *target, size_t bytes) {
  for (; bytes; bytes -= PAGE, source += PAGE, target += PAGE) {
    write_all(sockets[me][1], source, PAGE);
    size_t got = 0;
    while (got < PAGE) {
      struct iovec v[2] = {{target + got, (PAGE - got) / 2}, {target + got + (PAGE - got) / 2, (PAGE - got + 1) / 2}};
      struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
      ssize_t n = recvmsg(sockets[me][0], &m, 0);
      if (n <= 0 && errno != EINTR) {
        EQUAL(n, PAGE - got);
        return;
      }
      got += n > 0 ? n : 0;
    }
  }
}

static void by_file(long me, char *source, char *target, size_t bytes) {
  whole(pwrite(files[me], source, bytes, 0), bytes);
  struct iovec v[2] = {{target, bytes / 2 + 8}, {target + bytes / 2 + 8, bytes - bytes / 2 - 8}};
  whole(preadv(files[me], v, 2, 0), bytes);
}

static void open_channels(void) {
  for (int i = 0; i < 2; i++) {
    MUST(pipe(pipes[i]) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, sockets[i]) == 0);
    files[i] = syscall(SYS_memfd_create, "file", 1);
    MUST(files[i] >= 0);
  }
}

static void system_calls(void) {
  open_channels();
  transfer *const list[] = {by_pipe, by_vmsplice, by_socket, by_file};
  run_with(list, COUNT(list), private_pages);
}

// --- through a view of oneself

static void by_vm_write(long me, char *source, char *target, size_t bytes) {
  struct iovec from = {source, bytes}, to = {target, bytes};
  whole(process_vm_writev(getpid(), &from, 1, &to, 1, 0), bytes);
  (void)me;
}

static void by_vm_read(long me, char *source, char *target, size_t bytes) {
  struct iovec from = {source, bytes}, to = {target, bytes};
  whole(process_vm_readv(getpid(), &to, 1, &from, 1, 0), bytes);
  (void)me;
}

static void by_memory_file(long me, char *source, char *target, size_t bytes) {
  int fd = memory >= 0 ? memory : open("/proc/self/mem", O_RDWR | O_CLOEXEC);
  whole(pwrite(fd, source, bytes, (off_t)(uintptr_t)target), bytes);
  if (memory < 0)
    close(fd);
  (void)me;
}

static void own_memory(void) {
  memory = -1;
  transfer *const list[] = {by_vm_read, by_memory_file};
  run_with(list, COUNT(list), private_pages);
}

static void vm_writes(void) {
  transfer *const list[] = {by_vm_write};
  run_with(list, COUNT(list), private_pages);
}

// Pages that nothing can write, except through /proc/self/mem.
static char *read_only_pages(long i) {
  (void)i;
  char *p = mmap(0, 128 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  MUST(p != MAP_FAILED);
  return p;
}

static void read_only(void) {
  memory = -1;
  transfer *const list[] = {by_memory_file};
  run_with(list, COUNT(list), read_only_pages);
}

// --- from the disk, past the page cache: the device writes into pages that the kernel looked up some time before

#define DISK_PAGES 4096 // of known contents, from which pieces are read

static int disk;

static void read_disk(long me) {
  struct slots *s = &pages[me];
  long count = 64, from = any(&s->random, s->count - count + 1), at = any(&s->random, DISK_PAGES - count);
  slots_hold(s, from, count);
  ssize_t n;
  while ((n = pread(disk, s->at + from * PAGE, count * PAGE, at * PAGE)) < 0 && errno == EINTR)
    ;
  EQUAL(n, count * PAGE);
  for (long i = 0; i < count; i++)
    s->seed[from + i] = 1 + (at + i) * WORDS;
  slots_hold(s, from, count);
}

static void direct_reads(void) {
  char *data = map_anon(DISK_PAGES * PAGE);
  fill(data, DISK_PAGES * PAGE, 1);
  int fd = open(path_of("disk"), O_RDWR | O_CREAT | O_TRUNC, 0600);
  MUST(fd >= 0);
  write_all(fd, data, DISK_PAGES * PAGE);
  MUST(fsync(fd) == 0);
  close(fd);
  munmap(data, DISK_PAGES * PAGE);
  disk = open(path_of("disk"), O_RDONLY | O_DIRECT);
  if (disk < 0)
    SKIP("this file system has no direct reads");
  void (*const both[])(long) = {read_disk, read_disk};
  for (long i = 0; i < 2; i++)
    pages[i] = slots_in(map_anon(512 * PAGE), 512, i);
  together(both, 2);
  for (int i = 0; i < 2; i++)
    slots_hold(&pages[i], 0, pages[i].count);
}

// --- a memory file that is mapped, and written, punched and cut without the mapping

static int file;

static void write_memory_file(long me) {
  struct slots *s = &pages[me];
  long count = 1 + any(&s->random, RUN), from = any(&s->random, s->count - count + 1);
  uint64_t seed = s->random << 20 | 1;
  slots_hold(s, from, count);
  switch (any(&s->random, 4)) {
  case 0: // a hole
    EQUAL(fallocate(file, 3 /* punch, keep the size */, (me * s->count + from) * PAGE, count * PAGE), 0);
    for (long i = 0; i < count; i++)
      s->seed[from + i] = 0;
    break;
  case 1: // through the mapping
    fill(s->at + from * PAGE, count * PAGE, seed);
    for (long i = 0; i < count; i++)
      s->seed[from + i] = seed + i * WORDS;
    break;
  default: // through the file
    fill(sources[me], count * PAGE, seed);
    whole(pwrite(file, sources[me], count * PAGE, (me * s->count + from) * PAGE), count * PAGE);
    for (long i = 0; i < count; i++)
      s->seed[from + i] = seed + i * WORDS;
  }
  slots_hold(s, from, count);
}

static void resize_memory_file(long me) { // its end grows and shrinks; what comes back is zeros
  struct slots *s = &pages[me];
  slots_hold(s, 0, s->count);
  long keep = any(&s->random, s->count);
  EQUAL(ftruncate(file, (me * s->count + keep) * PAGE), 0);
  EQUAL(ftruncate(file, (me * s->count + s->count) * PAGE), 0);
  for (long i = keep; i < s->count; i++)
    s->seed[i] = 0;
  long i = any(&s->random, s->count);
  s->seed[i] = s->random;
  fill(s->at + i * PAGE, PAGE, s->seed[i]);
}

static void memory_file(void) {
  file = syscall(SYS_memfd_create, "notes", 1);
  MUST(file >= 0 && ftruncate(file, 256 * PAGE) == 0);
  char *p = mmap(0, 256 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  MUST(p != MAP_FAILED);
  for (int i = 0; i < 2; i++) {
    pages[i] = slots_in(p + i * 128 * PAGE, 128, i);
    sources[i] = map_anon(RUN * PAGE);
  }
  void (*const both[])(long) = {write_memory_file, resize_memory_file};
  together(both, 2);
  for (int i = 0; i < 2; i++)
    slots_hold(&pages[i], 0, pages[i].count);
}

// --- locks, each in a page of its own, and what they protect, in pages of its own

#define LOCKS 16
#define LOCKERS 3

struct guarded {
  pthread_mutex_t lock;
  char rest[PAGE - sizeof(pthread_mutex_t)];
  volatile uint64_t first;
  char more[PAGE - 8];
  volatile uint64_t second;
  char end[PAGE - 8];
};
static struct guarded *guarded;
static uint64_t lock_seeds[LOCKERS + 1];
static volatile uint64_t locked, orphaned, adopted;

static void lock(struct guarded *g) {
  int error = pthread_mutex_lock(&g->lock);
  if (error == EOWNERDEAD) { // its owner ended between the two
    EQUAL(g->first, g->second + 1);
    g->second++;
    __atomic_add_fetch(&adopted, 1, __ATOMIC_SEQ_CST);
    error = pthread_mutex_consistent(&g->lock);
  }
  EQUAL(error, 0);
  EQUAL(g->first, g->second);
}

static void lock_some(long me) {
  for (int n = 0; n < 20; n++) {
    struct guarded *g = &guarded[any(&lock_seeds[me], LOCKS)];
    lock(g);
    g->first++;
    if (any(&lock_seeds[me], 8) == 0)
      sched_yield();
    g->second++;
    __atomic_add_fetch(&locked, 1, __ATOMIC_SEQ_CST);
    EQUAL(pthread_mutex_unlock(&g->lock), 0);
  }
}

static void *end_with_a_lock(void *argument) {
  struct guarded *g = argument;
  lock(g);
  g->first++;
  __atomic_add_fetch(&locked, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&orphaned, 1, __ATOMIC_SEQ_CST);
  return 0; // and the kernel tells the next owner, in that page
}

static void orphan_some(long me) {
  pthread_join(spawn(end_with_a_lock, &guarded[any(&lock_seeds[me], LOCKS)]), 0);
}

static void (*const lockers[])(long) = {lock_some, lock_some, lock_some, orphan_some};

static void futexes(void) {
  guarded = map_anon(LOCKS * sizeof *guarded);
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a);
  pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
  for (int i = 0; i < LOCKS; i++)
    MUST(pthread_mutex_init(&guarded[i].lock, &a) == 0);
  together(lockers, LOCKERS + 1);
  uint64_t sum = 0;
  for (int i = 0; i < LOCKS; i++) {
    lock(&guarded[i]);
    sum += guarded[i].second;
    pthread_mutex_unlock(&guarded[i].lock);
  }
  EQUAL(sum, locked);
  EQUAL(adopted, orphaned);
}

SCENARIOS({"system_calls", system_calls}, {"own_memory", own_memory}, {"vm_writes", vm_writes}, {"read_only", read_only},
          {"direct_reads", direct_reads}, {"memory_file", memory_file}, {"futexes", futexes})
