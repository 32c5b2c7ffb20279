// System calls that a thread dispatches to itself (PR_SET_SYSCALL_USER_DISPATCH), as Wine does: a call from outside of a region
// becomes a SIGSYS, by whose handler it gets a result that no kernel would give.
#ifndef DISPATCH_H
#define DISPATCH_H
#include "target.h"
#include <linux/audit.h>
#include <sys/prctl.h>
#include <ucontext.h>

enum { LET_THROUGH, BLOCKED };
enum { OFF, WITHIN, AROUND }; // which calls go through: none is dispatched, those within the region, those around it
enum { MADE_UP = 0x5150, DISPATCH = 59 };

struct dispatch {
  int mode;
  unsigned long start, length;
  int has_selector;
  int at_rest; // what the selector is when no call is being tried
  long (*inside)(long, long, long, long);  // makes a call that goes through
  long (*outside)(long, long, long, long); // makes one that is dispatched
  volatile char selector;
};

static __thread struct dispatch *mine;
static __thread volatile int dispatched;
static volatile int foreign;

// Makes a call from the program's own code: number and three arguments; the way home from a handler.
long own_call(long, long, long, long);
extern const char own_call_end[];
__asm__(".pushsection .text\n"
        "own_call: mov %rdi, %rax; mov %rsi, %rdi; mov %rdx, %rsi; mov %rcx, %rdx; syscall; ret; mov $15, %eax; syscall\n"
        "own_call_end:\n"
        ".popsection");

static UNUSED long library_call(long nr, long a, long b, long c) {
  return syscall(nr, a, b, c);
}

static void on_dispatch(int signal, siginfo_t *info, void *context) {
  int is_ours = info->si_code == 2 && info->si_syscall == SYS_getppid && info->si_arch == AUDIT_ARCH_X86_64;
  if (is_ours && mine && signal == SIGSYS)
    dispatched++;
  else
    foreign++;
  if (mine && mine->has_selector)
    mine->selector = LET_THROUGH; // not every region has a way home from here
  ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = MADE_UP;
}

static UNUSED void handle_dispatch(void) {
  struct sigaction a = {.sa_sigaction = on_dispatch, .sa_flags = SA_SIGINFO};
  MUST(sigaction(SIGSYS, &a, 0) == 0);
}

// Where the code of the C library is.
static UNUSED struct dispatch within_library(void) {
  struct dispatch d = {WITHIN, 0, 0, 1, BLOCKED, library_call, own_call, LET_THROUGH};
  char line[4096], access[8];
  unsigned long start, end;
  FILE *f = fopen("/proc/self/maps", "r");
  while (f && fgets(line, sizeof line, f))
    if (strstr(line, "/libc") && sscanf(line, "%lx-%lx %7s", &start, &end, access) == 3 && access[2] == 'x') {
      d.start = start;
      d.length = end - start;
    }
  MUST(f && d.length);
  fclose(f);
  return d;
}

// From here on the thread dispatches its calls; 0 if the kernel cannot do that.
static UNUSED int begin_dispatch(struct dispatch *d) {
  mine = d;
  d->selector = LET_THROUGH;
  if (prctl(DISPATCH, d->mode, d->start, d->length, d->has_selector ? &d->selector : 0))
    return 0;
  d->selector = d->at_rest;
  return 1;
}

static UNUSED void end_dispatch(void) {
  struct dispatch *d = mine;
  if (d->has_selector)
    d->selector = LET_THROUGH;
  EQUAL(prctl(DISPATCH, OFF, 0, 0, 0), 0);
  mine = 0;
}

// Whether a call from outside is dispatched, once, and one from inside is not; the selector is as it was left.
static UNUSED int is_dispatched(void) {
  struct dispatch *d = mine;
  int before = dispatched, is_right = !d->has_selector || d->selector == d->at_rest;
  d->selector = BLOCKED;
  is_right &= d->outside(SYS_getppid, 0, 0, 0) == MADE_UP && dispatched == before + 1;
  if (d->length) {
    d->selector = BLOCKED;
    is_right &= d->inside(SYS_getppid, 0, 0, 0) != MADE_UP && dispatched == before + 1;
  }
  d->selector = d->at_rest;
  return is_right && !foreign;
}
#endif
