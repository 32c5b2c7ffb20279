// Memory that comes while the program runs already: every way to touch a page that is not there yet.
#include "target.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#define ROOM (48ul << 20)
#define THREADS 6

static char *memory;

static void make(void) {
  memory = map_anon(ROOM);
  for (size_t at = 0; at < ROOM; at += PAGE)
    fill(memory + at, PAGE, at);
}

static void *check_all(void *argument) {
  // Each thread in an order of its own, so that some touch the same page at the same time.
  uint64_t step = 2 * (uint64_t)(long)argument + 2741, at = (uint64_t)(long)argument;
  for (size_t n = 0; n < ROOM / PAGE; n++, at += step) {
    size_t page = at % (ROOM / PAGE) * PAGE;
    CHECK(filled(memory + page, PAGE, page));
  }
  return 0;
}

// All of it is read by many threads.
static void whole(void) {
  make();
  cut();
  pthread_t threads[THREADS];
  for (long i = 0; i < THREADS; i++)
    threads[i] = spawn(check_all, (void *)i);
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], 0);
}

// Far more is reserved than is used, as by what a sanitizer adds to a program.
static void reserved(void) {
  size_t size = 15ul << 40, pages = size / PAGE;
  char *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    SKIP("no such address space here");
  for (uint64_t i = 0; i < 300; i++)
    fill(p + mix(i) % pages * PAGE, PAGE, i);
  cut();
  for (uint64_t i = 0; i < 300; i++)
    CHECK(filled(p + mix(i) % pages * PAGE, PAGE, i));
  CHECK(all_zero(p + mix(1000) % pages * PAGE, PAGE));
}

static int is_filled_page(const void *at, size_t page) {
  return filled(at, PAGE, page);
}

// The kernel touches it for the program.
static void calls(void) {
  make();
  cut();
  char *at = memory;
  int pipes[2], file = open(path_of("file"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  MUST(file >= 0 && pipe2(pipes, O_CLOEXEC) == 0);
  static char here[16 * PAGE];
  // write(2) and writev(2) from pages that are not there, read(2) into them.
  EQUAL(pwrite(file, at, 16 * PAGE, 0), 16 * PAGE);
  EQUAL(pread(file, here, sizeof here, 0), sizeof here);
  for (size_t page = 0; page < sizeof here; page += PAGE)
    CHECK(is_filled_page(here + page, page));
  at += 8 << 20;
  EQUAL(pread(file, at + 100, 3 * PAGE, 0), 3 * PAGE);
  CHECK(memcmp(at + 100, here, 3 * PAGE) == 0);
  CHECK(is_filled_page(at + 4 * PAGE, 4 * PAGE + (8 << 20)));
  struct iovec parts[3];
  for (int i = 0; i < 3; i++)
    parts[i] = (struct iovec){memory + (12 << 20) + i * (1 << 20), 1000};
  EQUAL(writev(pipes[1], parts, 3), 3000);
  EQUAL(read(pipes[0], here, 3000), 3000);
  for (int i = 0; i < 3; i++)
    CHECK(memcmp(here + i * 1000, parts[i].iov_base, 1000) == 0);
  // Of the process itself, by way of others.
  struct iovec mine = {here, PAGE}, its = {memory + (16 << 20), PAGE};
  EQUAL(process_vm_readv(getpid(), &mine, 1, &its, 1, 0), PAGE);
  CHECK(is_filled_page(here, 16 << 20));
  // Here the kernel does not wait, and says so: there is no page yet.
  int mem = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
  MUST(mem >= 0);
  double until = now() + 20;
  while (pread(mem, here, PAGE, (long)memory + (17 << 20)) < 0 && errno == EIO && now() < until)
    nap(0.001);
  CHECK(is_filled_page(here, 17 << 20));
  while (pwrite(mem, "changed", 7, (long)memory + (18 << 20)) < 0 && errno == EIO && now() < until)
    nap(0.001);
  CHECK(memcmp(memory + (18 << 20), "changed", 7) == 0);
  memcpy(memory + (18 << 20), here, 7);
  fill(memory + (18 << 20), PAGE, 18 << 20);
  close(mem);
  // A futex, a signal's frame, a path, a time.
  uint32_t *word = (uint32_t *)(memory + (20 << 20));
  EQUAL(syscall(SYS_futex, word, 0x80, *word + 1, 0, 0, 0), -1);
  EQUAL(errno, EAGAIN);
  EQUAL(mlock(memory + (21 << 20), 1 << 20), 0);
  EQUAL(mprotect(memory + (23 << 20), 1 << 20, PROT_READ), 0);
  CHECK(is_filled_page(memory + (23 << 20), 23 << 20));
  EQUAL(mprotect(memory + (23 << 20), 1 << 20, PROT_READ | PROT_WRITE), 0);
  EQUAL(madvise(memory + (24 << 20), 4 << 20, MADV_HUGEPAGE), 0);
  EQUAL(madvise(memory + (24 << 20), 4 << 20, MADV_WILLNEED), 0);
  for (size_t page = 21 << 20; page < (28 << 20); page += PAGE)
    CHECK(is_filled_page(memory + page, page));
}

// What is dropped, unmapped, moved and replaced before it is there.
static void changes(void) {
  make();
  cut();
  char *at = memory;
  EQUAL(madvise(at + (1 << 20), 1 << 20, MADV_DONTNEED), 0);
  EQUAL(munmap(at + (2 << 20), 1 << 20), 0);
  EQUAL(mmap(at + (2 << 20), 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
        at + (2 << 20));
  char *moved = mremap(at + (3 << 20), 1 << 20, 2 << 20, MREMAP_MAYMOVE);
  MUST(moved != MAP_FAILED);
  char *target = map_anon(1 << 20);
  fill(target, 1 << 20, 1);
  EQUAL(mremap(at + (4 << 20), 1 << 20, 1 << 20, MREMAP_MAYMOVE | MREMAP_FIXED, target), target);
  // Moved twice, and a part of it once more.
  char *again = mremap(moved, 2 << 20, 2 << 20, MREMAP_MAYMOVE | MREMAP_FIXED, at + (3 << 20));
  EQUAL(again, at + (3 << 20));
  char *kept = mremap(at + (6 << 20), 1 << 20, 1 << 20, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
  MUST(kept != MAP_FAILED);
  CHECK(all_zero(at + (1 << 20), 2 << 20));
  for (size_t page = 3 << 20; page < (4 << 20); page += PAGE) {
    CHECK(is_filled_page(at + page, page));
    CHECK(is_filled_page(target + page - (3 << 20), page + (1 << 20)));
    CHECK(is_filled_page(kept + page - (3 << 20), page + (3 << 20)));
  }
  CHECK(all_zero(at + (4 << 20), 1 << 20));
  CHECK(all_zero(at + (6 << 20), 1 << 20));
  CHECK(is_filled_page(at + (5 << 20), 5 << 20));
  EQUAL(madvise(at + (8 << 20), 1 << 20, MADV_FREE), 0);
  for (size_t page = 8 << 20; page < (9 << 20); page += PAGE)
    CHECK(all_zero(at + page, PAGE) || is_filled_page(at + page, page));
  // Growing where it is, then shrinking.
  char *end = mremap(at + (40 << 20), 8 << 20, 12 << 20, MREMAP_MAYMOVE);
  MUST(end != MAP_FAILED);
  CHECK(all_zero(end + (8 << 20), 4 << 20));
  CHECK(is_filled_page(end + (7 << 20), 47 << 20));
  EQUAL(mremap(end, 12 << 20, 1 << 20, 0), end);
  EQUAL(mremap(end, 1 << 20, 2 << 20, MREMAP_MAYMOVE), end);
  CHECK(all_zero(end + (1 << 20), 1 << 20));
  for (size_t page = 40 << 20; page < (41 << 20); page += PAGE)
    CHECK(is_filled_page(end + page - (40 << 20), page));
  for (size_t page = 9 << 20; page < (40 << 20); page += PAGE)
    CHECK(is_filled_page(at + page, page));
}

// A block that grows, moves as a whole and shrinks, again and again.
static void grows(void) {
  make();
  char *places[2] = {map_anon(2 << 20), map_anon(2 << 20)};
  cut();
  char *block = memory + (3 << 20);
  double until = now() + 0.5;
  for (int i = 0; now() < until; i++) {
    block = mremap(block, 1 << 20, 2 << 20, MREMAP_MAYMOVE);
    MUST(block != MAP_FAILED);
    char *place = places[i % 2];
    EQUAL(mremap(block, 2 << 20, 2 << 20, MREMAP_MAYMOVE | MREMAP_FIXED, place), place);
    block = place;
    CHECK(is_filled_page(block + (i % 256) * PAGE, (3 << 20) + (i % 256) * PAGE));
    CHECK(all_zero(block + (1 << 20), PAGE));
    EQUAL(mremap(block, 2 << 20, 1 << 20, 0), block);
  }
}

// It writes to a part of its memory all the time.
static void writes(void) {
  make();
  ready();
  for (uint64_t round = 1; !gone(); round++) {
    for (size_t page = 8 << 20; page < (12 << 20); page += PAGE)
      memcpy(memory + page, &round, sizeof round);
    nap(0.005);
  }
  for (size_t page = 12 << 20; page < (40 << 20); page += PAGE)
    CHECK(is_filled_page(memory + page, page));
}

#define WATCHED 4

// One more thing to watch, of which there is always something to tell. It is told with its number.
static int watched(int epoll, uint64_t number) {
  int fd = eventfd(1, EFD_CLOEXEC);
  struct epoll_event event = {.events = EPOLLIN, .data.u64 = number};
  MUST(fd >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
  return fd;
}

static void *await_events(void *argument) {
  int epoll = epoll_create1(EPOLL_CLOEXEC), fds[WATCHED];
  char here[PAGE];
  for (uint64_t i = 0; i < WATCHED; i++)
    fds[i] = watched(epoll, i);
  size_t page = (size_t)(long)argument;
  for (uint64_t n = WATCHED; !gone(); n++, page = (page + THREADS) % (ROOM / PAGE)) {
    // What is closed is told no more, as nobody else has it: but for a moment, when somebody just lists what is open here.
    close(fds[n % WATCHED]);
    double until = now() + 0.001;
    struct epoll_event *events = (struct epoll_event *)(memory + page * PAGE);
    int told;
    do {
      told = epoll_wait(epoll, events, WATCHED, -1);
    } while (told == WATCHED && now() < until);
    EQUAL(told, WATCHED - 1);
    for (int i = 0; i < told; i++)
      CHECK(events[i].data.u64 > n - WATCHED && events[i].data.u64 < n);
    fds[n % WATCHED] = watched(epoll, n);
    fill(here, PAGE, page * PAGE);
    memcpy(events, here, WATCHED * sizeof *events);
    CHECK(is_filled_page(events, page * PAGE));
  }
  return 0;
}

// Threads wait for events, whose places are not there, with what the kernel holds meanwhile.
static void watches(void) {
  make();
  pthread_t threads[THREADS];
  for (long i = 0; i < THREADS; i++)
    threads[i] = spawn(await_events, (void *)i);
  ready();
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], 0);
}

static int child_of(int depth) {
  pid_t child = fork();
  MUST(child >= 0);
  if (child == 0) {
    failures = 0;
    size_t from = (size_t)depth << 22;
    for (size_t page = from; page < from + (4 << 20); page += PAGE)
      CHECK(is_filled_page(memory + page, page));
    // What is written here is not seen elsewhere.
    memset(memory + (40 << 20), depth, 1 << 20);
    EQUAL(madvise(memory + (41 << 20), 1 << 20, MADV_DONTNEED), 0);
    CHECK(all_zero(memory + (41 << 20), 1 << 20));
    if (depth < 3)
      CHECK(child_of(depth + 1) == 0);
    _exit(failures != 0);
  }
  int status;
  MUST(waitpid(child, &status, 0) == child);
  return status;
}

// Has children all the time, of which each looks at some of the memory and ends.
static void brood(void) {
  make();
  ready();
  for (long n = 0; !gone(); n++) {
    pid_t children[3];
    for (int i = 0; i < 3; i++) {
      MUST((children[i] = fork()) >= 0);
      if (children[i] == 0) {
        failures = 0;
        for (int k = 0; k < 4; k++) {
          size_t page = (n * 7919 + i * 104729 + k * 1299709) * PAGE % ROOM;
          CHECK(is_filled_page(memory + page, page));
        }
        nap(0.002);
        _exit(failures != 0);
      }
    }
    for (int i = 0; i < 3; i++) {
      int status;
      MUST(waitpid(children[i], &status, 0) == children[i]);
      EQUAL(status, 0);
    }
  }
}

// Copies of the process miss what it does.
static void children(void) {
  make();
  char *wiped = map_anon(4 * PAGE);
  fill(wiped, 4 * PAGE, 7);
  EQUAL(madvise(wiped, 4 * PAGE, MADV_WIPEONFORK), 0);
  cut();
  pid_t heir = fork();
  MUST(heir >= 0);
  if (heir == 0) {
    for (int i = 0; i < 4 * PAGE; i++)
      if (wiped[i])
        _exit(1);
    _exit(0);
  }
  int inherited = -1;
  MUST(waitpid(heir, &inherited, 0) == heir);
  EQUAL(inherited, 0);
  CHECK(filled(wiped, 4 * PAGE, 7));
  for (int i = 0; i < 8; i++) {
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
      execl("/bin/true", "true", (char *)0);
      _exit(9);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child);
    EQUAL(status, 0);
  }
  EQUAL(child_of(1), 0);
  for (size_t page = 0; page < ROOM; page += PAGE)
    CHECK(is_filled_page(memory + page, page));
}

// --- a tree

#define MEMBERS 7
#define SHARE (8ul << 20)
#define RANGE (1ul << 20)

// Children of members write all of it themselves.
#define BELOW 100

// Which contents a page has for a member, who has most of them written itself, each others; the rest is in common.
static uint64_t seed_of(long member, size_t page) {
  int own = member >= BELOW || (member && mix(page + (uint64_t)member) % 6);
  return page + (own ? (uint64_t)member << 32 : 0);
}

static void own_pages(long member) {
  for (size_t page = 0; page < SHARE; page += PAGE)
    if (seed_of(member, page) != page)
      fill(memory + page, PAGE, seed_of(member, page));
}

static void check_range(long member, const char *at, size_t from, size_t bytes) {
  for (size_t page = from; page < from + bytes; page += PAGE)
    CHECK(filled(at + page - from, PAGE, seed_of(member, page)));
}

static long who;

static void *check_member(void *argument) {
  uint64_t step = 2 * (uint64_t)(long)argument + 2741, at = (uint64_t)(long)argument;
  for (size_t n = 0; n < SHARE / PAGE; n++, at += step) {
    size_t page = at % (SHARE / PAGE) * PAGE;
    CHECK(filled(memory + page, PAGE, seed_of(who, page)));
  }
  return 0;
}

static void check_by_threads(void) {
  pthread_t threads[THREADS];
  for (long i = 0; i < THREADS; i++)
    threads[i] = spawn(check_member, (void *)i);
  for (int i = 0; i < THREADS; i++)
    pthread_join(threads[i], 0);
}

// A child of a member, and so on: each sees what the first did, and writes where that is not seen.
static int line_of(int depth) {
  pid_t child = fork();
  MUST(child >= 0);
  if (child == 0) {
    failures = 0;
    check_range(who, memory + depth * RANGE, depth * RANGE, RANGE);
    memset(memory + 5 * RANGE, depth, RANGE);
    EQUAL(madvise(memory + 6 * RANGE, RANGE, MADV_DONTNEED), 0);
    CHECK(all_zero(memory + 6 * RANGE, RANGE));
    if (depth < 3)
      EQUAL(line_of(depth + 1), 0);
    _exit(failures != 0);
  }
  int status;
  MUST(waitpid(child, &status, 0) == child);
  return status;
}

static void moves_it(void) {
  char *target = map_anon(RANGE);
  EQUAL(mremap(memory + RANGE, RANGE, RANGE, MREMAP_MAYMOVE | MREMAP_FIXED, target), target);
  char *kept = mremap(memory + 3 * RANGE, RANGE, RANGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
  MUST(kept != MAP_FAILED);
  CHECK(all_zero(memory + 3 * RANGE, RANGE));
  EQUAL(line_of(4), 0);
  check_range(who, target, RANGE, RANGE);
  check_range(who, kept, 3 * RANGE, RANGE);
  EQUAL(mremap(target, RANGE, RANGE, MREMAP_MAYMOVE | MREMAP_FIXED, memory + RANGE), memory + RANGE);
  EQUAL(mremap(kept, RANGE, RANGE, MREMAP_MAYMOVE | MREMAP_FIXED, memory + 3 * RANGE), memory + 3 * RANGE);
}

static void drops_it(void) {
  EQUAL(madvise(memory + 2 * RANGE, RANGE, MADV_DONTNEED), 0);
  EQUAL(munmap(memory + 4 * RANGE, RANGE), 0);
  EQUAL(mmap(memory + 4 * RANGE, RANGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
        memory + 4 * RANGE);
  CHECK(all_zero(memory + 2 * RANGE, RANGE) && all_zero(memory + 4 * RANGE, RANGE));
  for (size_t at = 2 * RANGE; at < 5 * RANGE; at += 2 * RANGE)
    for (size_t page = at; page < at + RANGE; page += PAGE)
      fill(memory + page, PAGE, seed_of(who, page));
}

// What its parent misses, into what it misses itself.
static void reads_its_parent(void) {
  char *here = memory + 7 * RANGE;
  struct iovec mine = {here, RANGE / 2}, its = {memory, RANGE / 2};
  EQUAL(process_vm_readv(getppid(), &mine, 1, &its, 1, 0), RANGE / 2);
  check_range(0, here, 0, RANGE / 2);
  own_pages(who);
  for (size_t page = 7 * RANGE; page < SHARE; page += PAGE)
    fill(memory + page, PAGE, seed_of(who, page));
}

static void executes(void) {
  for (int i = 0; i < 4; i++) {
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
      execl("/bin/true", "true", (char *)0);
      _exit(9);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child);
    EQUAL(status, 0);
  }
}

static void member_of_tree(int *wiped, int *alone) {
  switch (who) {
  case 1:
    drops_it();
    break;
  case 2:
    moves_it();
    break;
  case 3:
    EQUAL(line_of(1), 0);
    break;
  case 4:
    reads_its_parent();
    break;
  case 5:
    check_by_threads();
    break;
  case 6:
    executes();
    break;
  default:
    for (int i = 0; i < 3; i++)
      EQUAL(line_of(1), 0);
    EQUAL(*alone, 77);
  }
  EQUAL(*wiped, who ? 100 + who : 55);
  check_range(who, memory, 0, SHARE);
}

// A tree of processes that have much of their memory in common, and then go different ways.
static void tree(void) {
  memory = map_anon(SHARE);
  // Pages in common are scattered among others.
  madvise(memory, SHARE, MADV_HUGEPAGE);
  for (size_t at = 0; at < SHARE; at += PAGE)
    fill(memory + at, PAGE, at);
  int *arrived = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int *wiped = map_anon(PAGE), *alone = map_anon(PAGE);
  MUST(arrived != MAP_FAILED);
  EQUAL(madvise(wiped, PAGE, MADV_WIPEONFORK), 0);
  EQUAL(madvise(alone, PAGE, MADV_DONTFORK), 0);
  *wiped = 55, *alone = 77;
  pid_t members[MEMBERS] = {getpid()};
  for (long i = 1; i < MEMBERS; i++) {
    pid_t child = fork();
    MUST(child >= 0);
    members[i] = child;
    if (child)
      continue;
    who = i;
    failures = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    EQUAL(*wiped, 0);
    *wiped = 100 + (int)i;
    own_pages(i);
    // Some have children of their own.
    pid_t below = i % 2 ? fork() : 0;
    MUST(below >= 0);
    if (below == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (i % 2) {
        who = BELOW + i;
        own_pages(who);
      }
      __atomic_add_fetch(arrived, 1, __ATOMIC_SEQ_CST);
      wait_go();
      if (i % 2) {
        EQUAL(*wiped, 0);
        check_range(who, memory, 0, SHARE);
      } else {
        member_of_tree(wiped, alone);
      }
      _exit(failures != 0);
    }
    wait_go();
    member_of_tree(wiped, alone);
    int status;
    MUST(waitpid(below, &status, 0) == below);
    EQUAL(status, 0);
    _exit(failures != 0);
  }
  while (__atomic_load_n(arrived, __ATOMIC_SEQ_CST) < MEMBERS - 1)
    nap(0.001);
  cut();
  member_of_tree(wiped, alone);
  for (int i = 1; i < MEMBERS; i++) {
    int status = -1;
    EQUAL(waitpid(members[i], &status, 0), members[i]);
    EQUAL(status, 0);
  }
}

SCENARIOS({"tree", tree}, {"whole", whole}, {"reserved", reserved}, {"calls", calls}, {"changes", changes},
          {"children", children}, {"brood", brood}, {"grows", grows}, {"writes", writes}, {"watches", watches})
