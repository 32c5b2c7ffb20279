// Threads: identity, thread-local storage, names, scheduling, synchronisation, life after the cut.
#include "target.h"
#include <limits.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int released, arrived;

static void arrive(void) {
  pthread_mutex_lock(&lock);
  arrived++;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static void await_arrivals(int n) {
  pthread_mutex_lock(&lock);
  while (arrived < n)
    pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

static void await_release(void) {
  pthread_mutex_lock(&lock);
  while (!released)
    pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

static void release(void) {
  pthread_mutex_lock(&lock);
  released = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

// --- 64 threads with thread-local data and names

#define MANY 64
static __thread uint64_t local[32];
static pthread_key_t key;

static void *many_thread(void *argument) {
  long n = (long)argument;
  char name[16], seen[16];
  snprintf(name, sizeof name, "worker %ld", n);
  pthread_setname_np(pthread_self(), name);
  fill(local, sizeof local, n);
  pthread_setspecific(key, (void *)(n + 1));
  pthread_t self = pthread_self();
  pid_t tid = syscall(SYS_gettid);
  arrive();
  if (n % 16 == 0) // some run, the others sleep
    while (!__atomic_load_n(&released, __ATOMIC_ACQUIRE))
      sched_yield();
  else
    await_release();
  CHECK(filled(local, sizeof local, n));
  EQUAL(pthread_getspecific(key), n + 1);
  CHECK(pthread_equal(self, pthread_self()));
  EQUAL(syscall(SYS_gettid), tid);
  EQUAL(getpid(), syscall(SYS_getpid));
  prctl(PR_GET_NAME, seen);
  CHECK(!strcmp(name, seen));
  return (void *)(n * 3);
}

static void many(void) {
  pthread_t t[MANY];
  pthread_key_create(&key, 0);
  for (long i = 0; i < MANY; i++)
    t[i] = spawn(many_thread, (void *)i);
  await_arrivals(MANY);
  pid_t pid = getpid();
  cut();
  EQUAL(getpid(), pid);
  EQUAL(syscall(SYS_gettid), pid);
  release();
  for (long i = 0; i < MANY; i++) {
    void *result = 0;
    EQUAL(pthread_join(t[i], &result), 0);
    EQUAL(result, i * 3);
  }
}

// --- scheduling

struct attributes { // struct sched_attr
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime, deadline, period;
  uint32_t util_min, util_max;
};

struct scheduled {
  int policy, priority, nice, reset_on_fork;
  unsigned cpus;
};

static struct scheduled wanted[] = {
    {SCHED_OTHER, 0, 0, 0, 1}, {SCHED_OTHER, 0, 7, 0, 3}, {SCHED_OTHER, 0, 19, 0, 2}, {SCHED_BATCH, 0, 3, 0, 1},
    {SCHED_IDLE, 0, 0, 0, 3},  {SCHED_FIFO, 7, 0, 0, 1},  {SCHED_RR, 42, 0, 1, 2},    {SCHED_OTHER, 0, -5, 0, 3},
};

static void *scheduled_thread(void *argument) {
  struct scheduled *w = argument;
  long cpus = sysconf(_SC_NPROCESSORS_ONLN);
  unsigned mask = w->cpus & (cpus > 1 ? 3 : 1);
  if (!mask)
    mask = 1;
  cpu_set_t set, seen;
  CPU_ZERO(&set);
  for (int c = 0; c < 2; c++)
    if (mask & (1u << c))
      CPU_SET(c, &set);
  MUST(sched_setaffinity(0, sizeof set, &set) == 0);
  // A nice value that it has from whoever started it is none of those wanted, and a real-time thread keeps it.
  MUST(setpriority(PRIO_PROCESS, 0, 0) == 0 || errno == EACCES);
  struct attributes a = {.size = sizeof a, .policy = w->policy, .priority = w->priority, .nice = w->nice};
  a.flags = w->reset_on_fork;
  int may = syscall(SYS_sched_setattr, 0, &a, 0) == 0;
  if (!may && errno == EPERM)
    say("note: policy %d not permitted", w->policy);
  struct attributes before = {0}, after = {0};
  MUST(syscall(SYS_sched_getattr, 0, &before, sizeof before, 0) == 0);
  arrive();
  await_release();
  EQUAL(syscall(SYS_sched_getattr, 0, &after, sizeof after, 0), 0);
  EQUAL(after.policy, before.policy);
  EQUAL(after.flags, before.flags);
  EQUAL(after.nice, before.nice);
  EQUAL(after.priority, before.priority);
  if (may) {
    EQUAL(after.policy, w->policy);
    EQUAL(after.nice, w->nice);
  }
  EQUAL(sched_getaffinity(0, sizeof seen, &seen), 0);
  CHECK(CPU_EQUAL(&set, &seen));
  return 0;
}

static void scheduling(void) {
  pthread_t t[COUNT(wanted)];
  for (size_t i = 0; i < COUNT(wanted); i++)
    t[i] = spawn(scheduled_thread, &wanted[i]);
  await_arrivals(COUNT(wanted));
  cut();
  release();
  for (size_t i = 0; i < COUNT(wanted); i++)
    pthread_join(t[i], 0);
}

// --- threads that begin, end and are joined after the cut

static void *add_one(void *argument) {
  __atomic_add_fetch((int *)argument, 1, __ATOMIC_SEQ_CST);
  return argument;
}

static void *wait_and_return(void *argument) {
  await_release();
  return argument;
}

static void *wait_and_exit(void *argument) {
  await_release();
  pthread_exit(argument);
}

static void life_after(void) {
  int count = 0;
  pthread_t before[8], ended[4];
  for (int i = 0; i < 8; i++)
    before[i] = spawn(i % 2 ? wait_and_return : wait_and_exit, (void *)(long)(i + 100));
  for (int i = 0; i < 4; i++) // ended before the cut, joined after it
    ended[i] = spawn(add_one, &count);
  while (__atomic_load_n(&count, __ATOMIC_SEQ_CST) < 4)
    nap(0.001);
  cut();
  for (int i = 0; i < 4; i++) {
    void *result = 0;
    EQUAL(pthread_join(ended[i], &result), 0);
    EQUAL(result, &count);
  }
  pthread_t after[64];
  for (int i = 0; i < 64; i++)
    EQUAL(pthread_create(&after[i], 0, add_one, &count), 0);
  for (int i = 0; i < 64; i++)
    EQUAL(pthread_join(after[i], 0), 0);
  EQUAL(count, 68);
  release();
  for (int i = 0; i < 8; i++) {
    void *result = 0;
    EQUAL(pthread_join(before[i], &result), 0);
    EQUAL(result, i + 100);
  }
}

// --- cancellation after the cut

__attribute__((noreturn)) static void *cancelled_thread(void *unused) {
  (void)unused;
  arrive();
  for (;;)
    pause();
}

static void cancelled(void) {
  pthread_t t = spawn(cancelled_thread, 0);
  await_arrivals(1);
  cut();
  void *result = 0;
  EQUAL(pthread_cancel(t), 0);
  EQUAL(pthread_join(t, &result), 0);
  CHECK(result == PTHREAD_CANCELED);
}

// --- locks of all kinds that are held and waited for at the cut

static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_barrier_t barrier;
static pthread_mutex_t held = PTHREAD_MUTEX_INITIALIZER, inherited;
static int readers, owners;

static void *wait_rwlock(void *unused) {
  arrive();
  pthread_rwlock_rdlock(&rwlock);
  __atomic_add_fetch(&readers, 1, __ATOMIC_SEQ_CST);
  pthread_rwlock_unlock(&rwlock);
  return unused;
}

static void *wait_mutex(void *unused) {
  arrive();
  EQUAL(pthread_mutex_lock(&held), 0);
  owners++;
  EQUAL(pthread_mutex_unlock(&held), 0);
  return unused;
}

static void *wait_inherited(void *unused) {
  arrive();
  EQUAL(pthread_mutex_lock(&inherited), 0);
  __atomic_add_fetch(&owners, 100, __ATOMIC_SEQ_CST);
  EQUAL(pthread_mutex_unlock(&inherited), 0);
  return unused;
}

static void *wait_barrier(void *unused) {
  arrive();
  pthread_barrier_wait(&barrier);
  return unused;
}

static void locks(void) {
  pthread_t t[16];
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a);
  MUST(pthread_mutexattr_setprotocol(&a, PTHREAD_PRIO_INHERIT) == 0);
  MUST(pthread_mutex_init(&inherited, &a) == 0);
  pthread_barrier_init(&barrier, 0, 5);
  pthread_rwlock_wrlock(&rwlock);
  pthread_mutex_lock(&held);
  pthread_mutex_lock(&inherited);
  for (int i = 0; i < 16; i++)
    t[i] = spawn(i % 4 == 0 ? wait_rwlock : i % 4 == 1 ? wait_mutex : i % 4 == 2 ? wait_inherited : wait_barrier, 0);
  await_arrivals(16);
  nap(0.05);
  cut();
  EQUAL(readers, 0);
  EQUAL(owners, 0);
  pthread_rwlock_unlock(&rwlock);
  pthread_mutex_unlock(&held);
  EQUAL(pthread_mutex_unlock(&inherited), 0);
  pthread_barrier_wait(&barrier);
  for (int i = 0; i < 16; i++)
    EQUAL(pthread_join(t[i], 0), 0);
  EQUAL(readers, 4);
  EQUAL(owners, 404);
}

// --- a robust mutex whose owner ends after the cut

static pthread_mutex_t robust;

static void *robust_owner(void *unused) {
  pthread_mutex_lock(&robust);
  arrive();
  await_release();
  return unused; // without unlocking
}

static void robust_mutex(void) {
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a);
  pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
  MUST(pthread_mutex_init(&robust, &a) == 0);
  pthread_t t = spawn(robust_owner, 0);
  await_arrivals(1);
  cut();
  EQUAL(pthread_mutex_trylock(&robust), EBUSY);
  release();
  pthread_join(t, 0);
  EQUAL(pthread_mutex_lock(&robust), EOWNERDEAD);
  EQUAL(pthread_mutex_consistent(&robust), 0);
  EQUAL(pthread_mutex_unlock(&robust), 0);
}

// --- restartable sequences

extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const unsigned int __rseq_size __attribute__((weak));

static void check_rseq(void) {
  volatile uint32_t *area = (volatile uint32_t *)((char *)__builtin_thread_pointer() + __rseq_offset);
  // A registered area follows its thread from CPU to CPU: pin it to each in turn and look.
  cpu_set_t all, one;
  sched_getaffinity(0, sizeof all, &all);
  for (int c = 0; c < CPU_SETSIZE; c++)
    if (CPU_ISSET(c, &all)) {
      CPU_ZERO(&one);
      CPU_SET(c, &one);
      MUST(sched_setaffinity(0, sizeof one, &one) == 0);
      sched_yield();
      EQUAL(area[1], c);
    }
  sched_setaffinity(0, sizeof all, &all);
}

static void *rseq_thread(void *unused) {
  check_rseq();
  arrive();
  await_release();
  check_rseq();
  return unused;
}

static void rseq(void) {
  if (!&__rseq_offset || !__rseq_size)
    SKIP("the C library registers no rseq");
  pthread_t t[3];
  for (int i = 0; i < 3; i++)
    t[i] = spawn(rseq_thread, 0);
  await_arrivals(3);
  check_rseq();
  cut();
  release();
  check_rseq();
  for (int i = 0; i < 3; i++)
    pthread_join(t[i], 0);
  // The kernel must know the registration with the same signature: unregistering tells.
  void *area = (char *)__builtin_thread_pointer() + __rseq_offset;
  EQUAL(syscall(SYS_rseq, area, 32, 1, 0x53053053), 0);
}

// --- a thread that stands in a restartable sequence begins it anew

// Of each processor, on a line of its own; only sequences write there.
static struct { _Alignas(64) volatile long value; } counters[1024];
static volatile int enough;

// Adds one to the counter of this processor, unless the kernel interrupts it. The sequence is made long, so that most stops
// meet it.
static int count_here(char *area) {
#ifdef __x86_64__
  uint32_t cpu = *(volatile uint32_t *)(area + 4);
  volatile long *counter = &counters[cpu % 1024].value;
  __asm__ goto(
      ".pushsection __rseq_cs, \"aw\"\n"
      ".balign 32\n"
      "3: .long 0, 0\n"
      ".quad 1f, 2f - 1f, 4f\n"
      ".popsection\n"
      ".pushsection __rseq_failure, \"ax\"\n"
      ".byte 0x0f, 0xb9, 0x3d\n"
      ".long 0x53053053\n"
      "4: jmp %l[interrupted]\n"
      ".popsection\n"
      "leaq 3b(%%rip), %%rax\n"
      "movq %%rax, 8(%[area])\n"
      "1:\n"
      "cmpl %[cpu], 4(%[area])\n"
      "jnz 4b\n"
      "movq (%[counter]), %%rax\n"
      "movl $30000, %%ecx\n"
      "5: decl %%ecx\n"
      "jnz 5b\n"
      "incq %%rax\n"
      "movq %%rax, (%[counter])\n"
      "2:\n"
      :
      : [area] "r"(area), [cpu] "r"(cpu), [counter] "r"(counter)
      : "rax", "rcx", "memory", "cc"
      : interrupted);
  return 1;
interrupted:
#endif
  return 0;
}

static void *counting_thread(void *unused) {
  char *area = (char *)__builtin_thread_pointer() + __rseq_offset;
  long counted = 0;
  arrive();
  while (!enough)
    counted += count_here(area);
  return unused ? 0 : (void *)counted;
}

static void sections(void) {
  if (!&__rseq_offset || !__rseq_size)
    SKIP("the C library registers no rseq");
#ifndef __x86_64__
  SKIP("its sequence is written for x86-64");
#endif
  pthread_t t[6];
  for (int i = 0; i < 6; i++)
    t[i] = spawn(counting_thread, 0);
  await_arrivals(6);
  cut();
  usleep(20000);
  enough = 1;
  long counted = 0, sum = 0;
  for (int i = 0; i < 6; i++) {
    void *own;
    pthread_join(t[i], &own);
    counted += (long)own;
  }
  for (int i = 0; i < 1024; i++)
    sum += counters[i].value;
  EQUAL(sum, counted);
}

// --- the first thread has ended, the others go on

static pid_t leader;

static void *survivor(void *unused) {
  (void)unused;
  nap(0.05);
  cut();
  EQUAL(getpid(), leader);
  CHECK(syscall(SYS_gettid) != leader);
  int count = 0;
  pthread_t t;
  EQUAL(pthread_create(&t, 0, add_one, &count), 0);
  EQUAL(pthread_join(t, 0), 0);
  EQUAL(count, 1);
  if (!failures)
    say("ok");
  _exit(failures ? 1 : 0);
}

static void leader_ended(void) {
  leader = getpid();
  spawn(survivor, 0);
  syscall(SYS_exit, 0); // this thread alone
}

// --- fork, exec, wait

static void *idle(void *unused) {
  await_release();
  return unused;
}

static void fork_exec(void) {
  pthread_t t = spawn(idle, 0);
  cut();
  for (int i = 0; i < 5; i++) {
    pid_t child = fork();
    if (child == 0)
      _exit(40 + i);
    int status = 0;
    EQUAL(waitpid(child, &status, 0), child);
    EQUAL(WEXITSTATUS(status), 40 + i);
  }
  int ends[2];
  CHECK(pipe(ends) == 0);
  pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 1);
    execlp("sh", "sh", "-c", "echo $((6*7))", (char *)0);
    _exit(127);
  }
  close(ends[1]);
  char answer[8] = {0};
  EQUAL(read(ends[0], answer, sizeof answer), 3);
  CHECK(!strcmp(answer, "42\n"));
  int status = 0;
  EQUAL(waitpid(child, &status, 0), child);
  EQUAL(status, 0);
  FILE *p = popen("exit 9", "r"); // posix_spawn in glibc
  CHECK(p);
  EQUAL(WEXITSTATUS(pclose(p)), 9);
  release();
  EQUAL(pthread_join(t, 0), 0);
}

// --- threads that only compute

static uint64_t results[4];

static void *compute(void *argument) {
  long n = (long)argument;
  uint64_t x = n;
  double d = n + 1;
  for (int i = 0; i < 1600 * 1000; i++) {
    for (int j = 0; j < 100; j++)
      x = x * 6364136223846793005ull + 1442695040888963407ull;
    d = d * 0.999 + (x >> 60);
  }
  results[n] = x ^ (uint64_t)(d * 1e6);
  arrive();
  return 0;
}

static void computing(void) {
  pthread_t t[4];
  ready();
  for (long i = 0; i < 4; i++)
    t[i] = spawn(compute, (void *)i);
  for (int i = 0; i < 4; i++)
    pthread_join(t[i], 0);
  uint64_t first[4];
  memcpy(first, results, sizeof first);
  wait_go();
  for (long i = 0; i < 4; i++) {
    compute((void *)i);
    EQUAL(results[i], first[i]);
  }
}

SCENARIOS({"many", many}, {"scheduling", scheduling}, {"life_after", life_after}, {"cancelled", cancelled},
          {"locks", locks}, {"robust_mutex", robust_mutex}, {"rseq", rseq}, {"sections", sections}, {"leader_ended", leader_ended},
          {"fork_exec", fork_exec}, {"computing", computing})
