// Signals: masks, actions, queues with their details, alternate stacks, handlers that run at the cut.
#include "target.h"
#include <setjmp.h>
#include <ucontext.h>

static volatile int go_on;
static int arrived;

static void await(int n) {
  while (__atomic_load_n(&arrived, __ATOMIC_SEQ_CST) < n)
    nap(0.001);
}

static void await_on(void) {
  __atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST);
  while (!go_on)
    nap(0.002);
}

// The kernel's own view of the mask: the C library hides its internal signals.
static uint64_t mask_now(void) {
  uint64_t mask = 0;
  syscall(SYS_rt_sigprocmask, SIG_BLOCK, 0, &mask, 8);
  return mask;
}

static void *mask_thread(void *argument) {
  uint64_t want = mix((uint64_t)(uintptr_t)argument) & ~(1ull << (SIGKILL - 1)) & ~(1ull << (SIGSTOP - 1));
  syscall(SYS_rt_sigprocmask, SIG_SETMASK, &want, 0, 8);
  await_on();
  EQUAL(mask_now(), want);
  return 0;
}

static void masks(void) {
  pthread_t t[8];
  for (long i = 0; i < 8; i++)
    t[i] = spawn(mask_thread, (void *)i);
  await(8);
  uint64_t own = 1ull << (SIGUSR2 - 1) | 1ull << (SIGRTMAX - 1);
  syscall(SYS_rt_sigprocmask, SIG_SETMASK, &own, 0, 8);
  cut();
  EQUAL(mask_now(), own);
  go_on = 1;
  for (int i = 0; i < 8; i++)
    pthread_join(t[i], 0);
}

// --- actions

static void plain(int s) {
  (void)s;
}

static void detailed(int s, siginfo_t *i, void *c) {
  (void)s, (void)i, (void)c;
}

struct kernel_action {
  uint64_t handler, flags, restorer, mask;
};

static void actions(void) {
  struct kernel_action before[65], after[65];
  struct sigaction a;
  memset(&a, 0, sizeof a);
  a.sa_handler = plain;
  a.sa_flags = SA_RESTART | SA_NODEFER;
  sigaction(SIGUSR1, &a, 0);
  a.sa_sigaction = detailed;
  a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
  sigfillset(&a.sa_mask);
  sigaction(SIGUSR2, &a, 0);
  sigemptyset(&a.sa_mask);
  sigaddset(&a.sa_mask, SIGHUP);
  sigaddset(&a.sa_mask, SIGRTMAX);
  sigaction(SIGRTMIN + 5, &a, 0);
  sigaction(SIGRTMAX, &a, 0);
  a.sa_handler = plain;
  a.sa_flags = SA_NOCLDSTOP | SA_NOCLDWAIT;
  sigaction(SIGCHLD, &a, 0);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGTTOU, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  for (int s = 1; s < 65; s++)
    syscall(SYS_rt_sigaction, s, 0, &before[s], 8);
  cut();
  for (int s = 1; s < 65; s++) {
    syscall(SYS_rt_sigaction, s, 0, &after[s], 8);
    EQUAL(after[s].handler, before[s].handler);
    EQUAL(after[s].flags, before[s].flags);
    EQUAL(after[s].restorer, before[s].restorer);
    EQUAL(after[s].mask, before[s].mask);
  }
}

// --- queues

static void block_all(void) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, 0);
}

static int take(siginfo_t *info) {
  sigset_t all;
  sigfillset(&all);
  struct timespec none = {0, 0};
  memset(info, 0, sizeof *info);
  return syscall(SYS_rt_sigtimedwait, &all, info, &none, 8); // the C library would change si_code
}

static void queued_realtime_order(void) {
  block_all();
  pid_t self = getpid();
  for (int i = 0; i < 50; i++) {
    union sigval v = {.sival_ptr = (void *)(uintptr_t)mix(i)};
    MUST(sigqueue(self, SIGRTMIN + 8, v) == 0);
    if (i % 5 == 0)
      MUST(sigqueue(self, SIGRTMIN + 3, v) == 0);
  }
  cut();
  siginfo_t info;
  for (int i = 0; i < 50; i += 5) { // the lower number first
    EQUAL(take(&info), SIGRTMIN + 3);
    EQUAL(info.si_value.sival_ptr, mix(i));
    EQUAL(info.si_code, SI_QUEUE);
    EQUAL(info.si_pid, self);
    EQUAL(info.si_uid, getuid());
  }
  for (int i = 0; i < 50; i++) {
    EQUAL(take(&info), SIGRTMIN + 8);
    EQUAL(info.si_value.sival_ptr, mix(i));
    EQUAL(info.si_code, SI_QUEUE);
  }
  EQUAL(take(&info), -1);
}

static void pending_standard(void) {
  block_all();
  pid_t self = getpid();
  kill(self, SIGUSR1);
  kill(self, SIGUSR1); // a standard signal is pending once
  raise(SIGTERM);
  union sigval v = {.sival_int = -7};
  sigqueue(self, SIGHUP, v);
  sigset_t pending;
  cut();
  sigpending(&pending);
  for (int s = 1; s < 32; s++)
    EQUAL(sigismember(&pending, s), s == SIGUSR1 || s == SIGTERM || s == SIGHUP);
  siginfo_t info;
  int seen = 0;
  for (int i = 0; i < 3; i++) {
    int s = take(&info);
    seen |= s == SIGUSR1 ? 1 : s == SIGTERM ? 2 : s == SIGHUP ? 4 : 8;
    EQUAL(info.si_pid, self);
    if (s == SIGUSR1)
      EQUAL(info.si_code, SI_USER);
    if (s == SIGTERM)
      EQUAL(info.si_code, -6); // SI_TKILL
    if (s == SIGHUP)
      EQUAL(info.si_value.sival_int, -7);
  }
  EQUAL(seen, 7);
  EQUAL(take(&info), -1);
}

static void *pending_thread(void *argument) {
  long n = (long)argument;
  block_all();
  pid_t self = syscall(SYS_gettid);
  for (int i = 0; i < 3; i++) {
    siginfo_t info;
    memset(&info, 0, sizeof info);
    info.si_code = SI_QUEUE;
    info.si_pid = getpid();
    info.si_value.sival_ptr = (void *)(n * 1000 + i);
    MUST(syscall(SYS_rt_tgsigqueueinfo, getpid(), self, SIGRTMIN + 4, &info) == 0);
  }
  MUST(syscall(SYS_tgkill, getpid(), self, SIGUSR1) == 0);
  await_on();
  siginfo_t info;
  EQUAL(take(&info), SIGUSR1);
  EQUAL(info.si_code, -6);
  for (int i = 0; i < 3; i++) {
    EQUAL(take(&info), SIGRTMIN + 4);
    EQUAL(info.si_value.sival_ptr, n * 1000 + i);
  }
  EQUAL(take(&info), -1);
  return 0;
}

static void pending_per_thread(void) {
  pthread_t t[4];
  block_all();
  for (long i = 0; i < 4; i++)
    t[i] = spawn(pending_thread, (void *)i);
  await(4);
  cut();
  siginfo_t info;
  EQUAL(take(&info), -1); // nothing strayed to the process or this thread
  go_on = 1;
  for (int i = 0; i < 4; i++)
    pthread_join(t[i], 0);
}

// --- a blocked signal is delivered once, after the cut

static volatile int delivered;

static void count(int s) {
  (void)s;
  delivered++;
}

static void delivered_once(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigprocmask(SIG_BLOCK, &set, 0);
  signal(SIGUSR1, count);
  kill(getpid(), SIGUSR1);
  cut();
  EQUAL(delivered, 0);
  sigprocmask(SIG_UNBLOCK, &set, 0);
  EQUAL(delivered, 1);
  nap(0.05);
  EQUAL(delivered, 1);
}

// --- alternate stacks

static __thread char *stack_base;
static __thread volatile int ran_there;
#define STACK (64 * 1024)

static void on_stack(int s) {
  (void)s;
  char here;
  ran_there = &here > stack_base && &here < stack_base + STACK;
}

static void *altstack_thread(void *unused) {
  stack_base = map_anon(STACK);
  stack_t stack = {.ss_sp = stack_base, .ss_size = STACK}, seen;
  MUST(sigaltstack(&stack, 0) == 0);
  await_on();
  EQUAL(sigaltstack(0, &seen), 0);
  EQUAL(seen.ss_sp, stack_base);
  EQUAL(seen.ss_size, STACK);
  EQUAL(seen.ss_flags, 0);
  raise(SIGUSR1);
  EQUAL(ran_there, 1);
  return unused;
}

static void alternate_stacks(void) {
  struct sigaction a = {.sa_handler = on_stack, .sa_flags = SA_ONSTACK};
  sigaction(SIGUSR1, &a, 0);
  pthread_t t[4];
  for (int i = 0; i < 4; i++)
    t[i] = spawn(altstack_thread, 0);
  await(4);
  cut();
  stack_t seen;
  EQUAL(sigaltstack(0, &seen), 0);
  EQUAL(seen.ss_flags, SS_DISABLE);
  go_on = 1;
  for (int i = 0; i < 4; i++)
    pthread_join(t[i], 0);
}

// --- a handler runs at the cut, on the alternate stack, another one inside it

static volatile int depth;

static void inner(int s) {
  (void)s;
  depth = 2;
  while (!go_on)
    nap(0.001);
}

static void outer(int s, siginfo_t *info, void *context) {
  (void)s;
  stack_t seen;
  depth = 1;
  EQUAL(info->si_value.sival_int, 99);
  raise(SIGUSR2);
  EQUAL(sigaltstack(0, &seen), 0);
  EQUAL(seen.ss_flags, SS_ONSTACK);
  CHECK(((ucontext_t *)context)->uc_stack.ss_size == STACK);
  EQUAL(mask_now(), 1ull << (SIGUSR1 - 1) | 1ull << (SIGHUP - 1));
}

static void *run_handler(void *unused) {
  stack_base = map_anon(STACK);
  stack_t stack = {.ss_sp = stack_base, .ss_size = STACK}, seen;
  MUST(sigaltstack(&stack, 0) == 0);
  uint64_t none = 0;
  syscall(SYS_rt_sigprocmask, SIG_SETMASK, &none, 0, 8);
  double kept[8];
  for (int i = 0; i < 8; i++)
    kept[i] = i * 1.25;
  siginfo_t info;
  memset(&info, 0, sizeof info);
  info.si_code = SI_QUEUE;
  info.si_value.sival_int = 99;
  EQUAL(syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), SIGUSR1, &info), 0);
  EQUAL(depth, 2);
  for (int i = 0; i < 8; i++)
    CHECK(kept[i] == i * 1.25);
  EQUAL(mask_now(), 0);
  sigaltstack(0, &seen);
  EQUAL(seen.ss_flags, 0);
  return unused;
}

static void handler_running(void) {
  struct sigaction a = {.sa_sigaction = outer, .sa_flags = SA_ONSTACK | SA_SIGINFO};
  sigemptyset(&a.sa_mask);
  sigaddset(&a.sa_mask, SIGHUP);
  sigaction(SIGUSR1, &a, 0);
  struct sigaction b = {.sa_handler = inner, .sa_flags = SA_ONSTACK};
  sigaction(SIGUSR2, &b, 0);
  pthread_t t = spawn(run_handler, 0);
  while (depth < 2)
    nap(0.001);
  cut();
  go_on = 1;
  pthread_join(t, 0);
}

// --- faults after the cut go to their handlers

static sigjmp_buf escape;
static volatile uintptr_t fault_address;
static volatile int fault_code;

static void on_fault(int s, siginfo_t *info, void *context) {
  (void)s, (void)context;
  fault_address = (uintptr_t)info->si_addr;
  fault_code = info->si_code;
  siglongjmp(escape, 1);
}

static void faults(void) {
  struct sigaction a = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &a, 0);
  sigaction(SIGFPE, &a, 0);
  char *page = mmap(0, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  cut();
  if (!sigsetjmp(escape, 1)) {
    *(volatile char *)(page + 5) = 1;
    CHECK(!"written to a read-only page");
  }
  EQUAL(fault_address, (uintptr_t)page + 5);
  EQUAL(fault_code, SEGV_ACCERR);
  volatile int zero = 0;
  if (!sigsetjmp(escape, 1)) {
    zero = 77 / zero;
    CHECK(!"divided by zero");
  }
  EQUAL(fault_code, FPE_INTDIV);
}

// --- signals that keep coming during everything: none lost that was queued

static volatile int received;

static void on_queue(int s, siginfo_t *info, void *context) {
  (void)s, (void)context;
  if (info->si_value.sival_int == received)
    received++;
  else
    received = -1000000;
}

static void *queue_all(void *unused) {
  for (int i = 0; i < 3000; i++) {
    union sigval v = {.sival_int = i};
    while (sigqueue(getpid(), SIGRTMIN + 6, v))
      nap(0.001);
    nap(0.0002);
  }
  return unused;
}

static void storm(void) {
  struct sigaction a = {.sa_sigaction = on_queue, .sa_flags = SA_SIGINFO | SA_RESTART};
  sigaction(SIGRTMIN + 6, &a, 0);
  ready();
  sigset_t set, old;
  sigemptyset(&set);
  sigaddset(&set, SIGRTMIN + 6);
  pthread_sigmask(SIG_BLOCK, &set, &old);
  pthread_t t = spawn(queue_all, 0);
  pthread_sigmask(SIG_SETMASK, &old, 0);
  pthread_join(t, 0);
  wait_go();
  nap(0.01);
  EQUAL(received, 3000);
}

// --- threads that fault all the time: one may be stopped between the fault and its handler

static __thread char *fenced;
static __thread volatile long faulted;
static volatile long wrong;

static void on_fence(int s, siginfo_t *info, void *context) {
  (void)s, (void)context;
  if ((char *)info->si_addr != fenced || info->si_code != SEGV_ACCERR)
    wrong++;
  faulted++;
  mprotect(fenced, PAGE, PROT_READ | PROT_WRITE);
}

static void *fault_all_the_time(void *unused) {
  fenced = mmap(0, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  MUST(fenced != MAP_FAILED);
  __atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST);
  for (long turn = 1; !go_on; turn++) {
    *(volatile char *)fenced = 1;
    if (faulted != turn)
      wrong++;
    mprotect(fenced, PAGE, PROT_NONE);
  }
  return unused;
}

static void faulting(void) {
  struct sigaction a = {.sa_sigaction = on_fence, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &a, 0);
  pthread_t t[4];
  for (int i = 0; i < 4; i++)
    t[i] = spawn(fault_all_the_time, 0);
  await(4);
  cut();
  nap(0.01);
  go_on = 1;
  for (int i = 0; i < 4; i++)
    pthread_join(t[i], 0);
  EQUAL(wrong, 0);
}

SCENARIOS({"masks", masks}, {"actions", actions}, {"queued_realtime_order", queued_realtime_order},
          {"pending_standard", pending_standard}, {"pending_per_thread", pending_per_thread},
          {"delivered_once", delivered_once}, {"alternate_stacks", alternate_stacks},
          {"handler_running", handler_running}, {"faults", faults}, {"storm", storm},
          {"faulting", faulting})
