// Trees of processes: relations, what they share, what each has alone, and who comes and goes during the cut.
#include "family.h"
#include <limits.h>
#include <poll.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <termios.h>

extern char **environ;

// --- one child

static uint64_t own[4096];

static void one_child(long parent) {
  fill(own, sizeof own, 7);
  pid_t pid = getpid();
  arrive();
  wait_go();
  CHECK(filled(own, sizeof own, 7));
  EQUAL(getpid(), pid);
  EQUAL(getppid(), parent);
}

static void pair(void) {
  open_board();
  fill(own, sizeof own, 3);
  pid_t pid = child(one_child, getpid());
  await_arrivals(1);
  cut();
  CHECK(filled(own, sizeof own, 3));
  await(pid, 0);
}

// --- a long line of descendants

static void descend(long depth) {
  pid_t parent = getppid();
  fill(own, sizeof own, depth);
  pid_t pid = depth ? child(descend, depth - 1) : 0;
  arrive();
  wait_go();
  CHECK(filled(own, sizeof own, depth));
  EQUAL(getppid(), parent);
  if (pid)
    await(pid, 0);
}

static void generations(void) {
  open_board();
  pid_t pid = child(descend, 7);
  await_arrivals(8);
  cut();
  await(pid, 0);
}

// --- many children, with threads

static void *idle(void *argument) {
  char name[16];
  snprintf(name, sizeof name, "idle %ld", (long)argument);
  pthread_setname_np(pthread_self(), name);
  pid_t tid = syscall(SYS_gettid);
  arrive();
  wait_go();
  EQUAL(syscall(SYS_gettid), tid);
  return argument;
}

static void threaded(long n) {
  pthread_t threads[3];
  for (long i = 0; i < 3; i++)
    threads[i] = spawn(idle, (void *)(n * 10 + i));
  arrive();
  wait_go();
  for (long i = 0; i < 3; i++) {
    void *result;
    pthread_join(threads[i], &result);
    EQUAL(result, n * 10 + i);
  }
}

static void many(void) {
  open_board();
  pid_t pids[20];
  for (long i = 0; i < 20; i++)
    pids[i] = child(threaded, i);
  await_arrivals(80);
  cut();
  for (int i = 0; i < 20; i++)
    await(pids[i], 0);
}

// --- other programs

static void programs(void) {
  char *sleeping[] = {"sleep", "1000", 0};
  char *shell[] = {"sh", "-c", "read line; sleep 1000 & trap 'kill $!; exit 3' TERM; echo $line; wait", 0};
  int in[2], out[2];
  MUST(!pipe(in) && !pipe(out));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  for (int i = 0; i < 2; i++) {
    posix_spawn_file_actions_addclose(&actions, in[i]);
    posix_spawn_file_actions_addclose(&actions, out[i]);
  }
  pid_t sleeper, reader;
  MUST(!posix_spawnp(&sleeper, "sleep", 0, 0, sleeping, environ));
  MUST(!posix_spawnp(&reader, "sh", &actions, 0, shell, environ));
  close(in[0]);
  close(out[1]);
  nap(0.1);
  cut();
  MUST(write(in[1], "word\n", 5) == 5);
  char line[16] = {0};
  EQUAL(read(out[0], line, sizeof line), 5);
  CHECK(!strcmp(line, "word\n"));
  EQUAL(kill(sleeper, SIGTERM), 0);
  EQUAL(kill(reader, SIGTERM), 0);
  await(sleeper, SIGTERM);
  await(reader, 3 << 8);
}

// --- children that have ended

static volatile int told;

static void tell(int signal) {
  (void)signal;
  told++;
}

static void end(long how) {
  if (how < 256)
    _exit(how);
  signal(how - 256, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, 0);
  struct rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  raise(how - 256);
}

static void await_zombie(pid_t pid) {
  siginfo_t info;
  MUST(!waitid(P_PID, pid, &info, WEXITED | WNOWAIT));
}

static void ended(void) {
  long how[] = {0, 1, 42, 255, 256 + SIGKILL, 256 + SIGTERM, 256 + SIGSEGV, 256 + SIGUSR1};
  int expected[] = {0, 1 << 8, 42 << 8, 255 << 8, SIGKILL, SIGTERM, SIGSEGV, SIGUSR1};
  pid_t pids[COUNT(how)];
  struct sigaction action = {.sa_handler = tell, .sa_flags = SA_RESTART};
  MUST(!sigaction(SIGCHLD, &action, 0));
  for (size_t i = 0; i < COUNT(how); i++) {
    pids[i] = child(end, how[i]);
    await_zombie(pids[i]);
  }
  nap(0.01);
  int before = told;
  cut();
  EQUAL(told, before);
  for (size_t i = 0; i < COUNT(how); i++)
    await(pids[i], expected[i]);
  CHECK(waitpid(-1, 0, 0) < 0 && errno == ECHILD);
}

// An end of which the parent has not been told yet, as it blocks the signal.
static void ended_pending(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  MUST(!sigprocmask(SIG_BLOCK, &set, 0));
  pid_t pid = child(end, 5);
  await_zombie(pid);
  cut();
  siginfo_t info = {0};
  struct timespec at_once = {0, 0};
  EQUAL(sigtimedwait(&set, &info, &at_once), SIGCHLD);
  EQUAL(info.si_pid, pid);
  EQUAL(info.si_status, 5);
  CHECK(sigtimedwait(&set, &info, &at_once) < 0 && errno == EAGAIN);
  await(pid, 5 << 8);
}

// Children whose end is told by another signal, or by none.
static pid_t clone_child(int signal, void (*run)(long), long argument) {
  pid_t pid = syscall(SYS_clone, signal, 0, 0, 0, 0);
  MUST(pid >= 0);
  if (!pid) {
    run(argument);
    ends();
  }
  return pid;
}

static void until_go(long unused) {
  (void)unused;
  arrive();
  wait_go();
}

static void until_word(long unused) {
  (void)unused;
  arrive();
  while (!__atomic_load_n(&board->words[0], __ATOMIC_SEQ_CST))
    nap(0.001);
}

static void exit_signals(void) {
  open_board();
  struct sigaction action = {.sa_handler = tell, .sa_flags = SA_RESTART};
  MUST(!sigaction(SIGUSR1, &action, 0));
  pid_t first = clone_child(SIGUSR1, until_word, 0), second = clone_child(0, until_word, 0);
  pid_t over = clone_child(SIGUSR1, end, 9);
  siginfo_t info;
  MUST(!waitid(P_PID, over, &info, WEXITED | WNOWAIT | __WALL));
  nap(0.01);
  await_arrivals(2);
  int before = told;
  cut();
  EQUAL(told, before);
  int status = -1;
  EQUAL(waitpid(over, &status, __WCLONE), over);
  EQUAL(status, 9 << 8);
  __atomic_store_n(&board->words[0], 1, __ATOMIC_SEQ_CST);
  while (waitpid(first, &status, __WCLONE) < 0 && errno == EINTR)
    ;
  EQUAL(status, 0);
  while (waitpid(second, &status, __WCLONE) < 0 && errno == EINTR)
    ;
  EQUAL(status, 0);
  EQUAL(told, before + 1);
}

static void nobody_waits(void) {
  open_board();
  struct sigaction action = {.sa_handler = SIG_DFL, .sa_flags = SA_NOCLDWAIT};
  MUST(!sigaction(SIGCHLD, &action, 0));
  pid_t pid = child(until_go, 0);
  await_arrivals(1);
  cut();
  while (!kill(pid, 0))
    nap(0.001);
  CHECK(waitpid(pid, 0, 0) < 0 && errno == ECHILD);
}

// --- sessions and process groups

static void session_child(long unused) {
  (void)unused;
  pid_t session = getsid(0), group = getpgrp();
  arrive();
  wait_go();
  EQUAL(getsid(0), session);
  EQUAL(getpgrp(), group);
}

static void daemon_like(long unused) {
  (void)unused;
  pid_t before = child(session_child, 0);
  await_arrivals(2); // the first one is in the old session
  MUST(setsid() == getpid());
  pid_t after = child(session_child, 0);
  await_arrivals(3);
  pid_t session = getsid(0);
  arrive();
  wait_go();
  EQUAL(session, getpid());
  EQUAL(getsid(0), session);
  EQUAL(getsid(after), session);
  CHECK(getsid(before) != session);
  await(before, 0);
  await(after, 0);
}

static void sessions(void) {
  open_board();
  pid_t first = child(session_child, 0);
  await_arrivals(1);
  pid_t pid = child(daemon_like, 0);
  await_arrivals(4);
  pid_t session = getsid(0);
  cut();
  EQUAL(getsid(0), session);
  EQUAL(getsid(pid), pid);
  await(first, 0);
  await(pid, 0);
}

static void in_group(long group) {
  MUST(!setpgid(0, group));
  pid_t mine = getpgrp();
  arrive();
  wait_go();
  EQUAL(getpgrp(), mine);
}

static void groups(void) {
  open_board();
  pid_t leader = child(in_group, 0);
  await_arrivals(1);
  pid_t second = child(in_group, leader), third = child(in_group, leader);
  await_arrivals(3);
  pid_t group = getpgrp();
  cut();
  EQUAL(getpgrp(), group);
  EQUAL(getpgid(leader), leader);
  EQUAL(getpgid(second), leader);
  EQUAL(getpgid(third), leader);
  EQUAL(killpg(leader, 0), 0);
  await(leader, 0);
  await(second, 0);
  await(third, 0);
}

static void brief_leader(long unused) {
  (void)unused;
  MUST(!setpgid(0, 0));
  arrive();
  while (__atomic_load_n(&board->words[0], __ATOMIC_SEQ_CST) == 0)
    nap(0.001);
}

// The leader of a group has ended, and the group goes on.
static void leaderless(void) {
  open_board();
  pid_t leader = child(brief_leader, 0);
  await_arrivals(1);
  pid_t second = child(in_group, leader), third = child(in_group, leader);
  await_arrivals(3);
  board->words[0] = 1;
  await(leader, 0);
  cut();
  EQUAL(getpgid(second), leader);
  EQUAL(getpgid(third), leader);
  EQUAL(killpg(leader, 0), 0);
  await(second, 0);
  await(third, 0);
}

// The leader of a group has ended and was not waited for.
static void dead_leader(void) {
  open_board();
  pid_t leader = child(brief_leader, 0);
  await_arrivals(1);
  pid_t second = child(in_group, leader);
  await_arrivals(2);
  board->words[0] = 1;
  await_zombie(leader);
  cut();
  EQUAL(getpgid(second), leader);
  await(leader, 0);
  await(second, 0);
}

// --- sessions whose leaders have ended

// Has a child, and a child that ends, both of this session; itself it may be in a group of its own.
static void session_member(long has_group) {
  if (has_group)
    MUST(!setpgid(0, 0));
  pid_t pid = child(session_child, 0), over = child(end, 6);
  await_zombie(over);
  pid_t session = getsid(0), group = getpgrp();
  arrive();
  wait_go();
  EQUAL(getsid(0), session);
  EQUAL(getpgrp(), group);
  EQUAL(getsid(pid), session);
  EQUAL(getpgid(pid), group);
  await(over, 6 << 8);
  await(pid, 0);
}

static void leads_and_ends(long unused) {
  (void)unused;
  MUST(setsid() == getpid());
  board->words[10] = child(session_member, 0);
  board->words[11] = child(session_member, 1);
  board->words[12] = child(end, 9);
  await_zombie(board->words[12]);
  await_arrivals(4);
}

static void session_goes_on(int leader_is_buried) {
  open_board();
  MUST(!prctl(PR_SET_CHILD_SUBREAPER, 1));
  pid_t leader = child(leads_and_ends, 0);
  if (leader_is_buried)
    await(leader, 0);
  else
    await_zombie(leader);
  int first = board->words[10], second = board->words[11], over = board->words[12];
  EQUAL(getsid(first), leader);
  pid_t ours = getsid(0);
  cut();
  EQUAL(getsid(0), ours);
  EQUAL(getsid(first), leader);
  EQUAL(getsid(second), leader);
  EQUAL(getpgid(first), leader);
  EQUAL(getpgid(second), second);
  EQUAL(killpg(leader, 0), 0);
  if (!leader_is_buried)
    await(leader, 0);
  await(over, 9 << 8);
  await(first, 0);
  await(second, 0);
  CHECK(waitpid(-1, 0, 0) < 0 && errno == ECHILD);
}

static void lost_session(void) {
  session_goes_on(1);
}

static void dead_session(void) {
  session_goes_on(0);
}

// A member of a session without a leader begins one itself, and its first child remains behind.
static void goes_away(long unused) {
  (void)unused;
  pid_t behind = child(session_child, 0);
  await_arrivals(1);
  pid_t session = getsid(0);
  MUST(setsid() == getpid());
  arrive();
  wait_go();
  EQUAL(getsid(0), getpid());
  EQUAL(getsid(behind), session);
  await(behind, 0);
}

static void begins_for_others(long unused) {
  (void)unused;
  MUST(setsid() == getpid());
  board->words[10] = child(goes_away, 0);
  await_arrivals(2);
}

static void left_session(void) {
  open_board();
  MUST(!prctl(PR_SET_CHILD_SUBREAPER, 1));
  pid_t leader = child(begins_for_others, 0);
  await(leader, 0);
  cut();
  EQUAL(getsid(board->words[10]), board->words[10]);
  await(board->words[10], 0);
}

// --- orphans that come back to an ancestor

static void leave_orphan(long unused) {
  (void)unused;
  child(session_child, 0);
  await_arrivals(1);
}

static void orphans(void) {
  open_board();
  MUST(!prctl(PR_SET_CHILD_SUBREAPER, 1));
  pid_t middle = child(leave_orphan, 0);
  await(middle, 0);
  cut();
  int status, n = 0, reaps = 0;
  MUST(!prctl(PR_GET_CHILD_SUBREAPER, &reaps));
  EQUAL(reaps, 1);
  while (wait(&status) > 0) {
    n++;
    EQUAL(status, 0);
  }
  EQUAL(n, 1);
}

// --- job control

static void *pauses(void *unused) {
  for (;;)
    pause();
  return unused;
}

static void threads_until_go(long n) {
  for (int i = 0; i < 3; i++)
    spawn(pauses, 0);
  until_go(n);
}

static void stopped(void) {
  open_board();
  pid_t pid = child(until_go, 0), other = child(until_go, 0), doomed[2] = {child(threads_until_go, 0), child(threads_until_go, 0)};
  await_arrivals(4);
  int status;
  for (int i = 0; i < 2; i++) { // by a signal that waits until they go on: of the process, and of its main thread
    kill(doomed[i], SIGSTOP);
    MUST(waitpid(doomed[i], &status, WUNTRACED) == doomed[i] && WIFSTOPPED(status));
    MUST((i ? syscall(SYS_tgkill, doomed[i], doomed[i], SIGUSR1) : kill(doomed[i], SIGUSR1)) == 0);
  }
  kill(pid, SIGSTOP);
  kill(other, SIGSTOP); // (an orphaned group cannot be stopped by SIGTSTP)
  MUST(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
  MUST(waitpid(other, &status, WUNTRACED) == other && WIFSTOPPED(status));
  cut();
  nap(0.05);
  EQUAL(waitpid(pid, &status, WNOHANG | WUNTRACED), 0);
  EQUAL(waitpid(other, &status, WNOHANG | WUNTRACED), 0);
  for (int i = 0; i < 2; i++) {
    EQUAL(waitpid(doomed[i], &status, WNOHANG | WUNTRACED), 0);
    kill(doomed[i], SIGCONT);
    EQUAL(waitpid(doomed[i], &status, 0), doomed[i]);
    EQUAL(status, SIGUSR1);
  }
  kill(pid, SIGCONT);
  kill(other, SIGCONT);
  await(pid, 0);
  await(other, 0);
}

// --- memory that is shared

static void shares_memory(long n) {
  uint64_t *memory = (uint64_t *)n;
  arrive();
  wait_go();
  pthread_mutex_lock(&board->mutex);
  memory[0]++;
  board->words[1]++;
  pthread_mutex_unlock(&board->mutex);
}

static void shared_memory(void) {
  open_board();
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&board->mutex, &attributes);
  uint64_t *memory = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  fill(memory, 1 << 20, 5);
  memory[0] = 0;
  pid_t pids[4];
  for (int i = 0; i < 4; i++)
    pids[i] = child(shares_memory, (long)memory);
  await_arrivals(4);
  cut();
  for (int i = 0; i < 4; i++)
    await(pids[i], 0);
  EQUAL(memory[0], 4);
  EQUAL(board->words[1], 4);
  memory[0] = mix(5);
  CHECK(filled(memory, 1 << 20, 5));
}

static int shared_fd;

static void maps_anew(long unused) {
  (void)unused;
  uint64_t *memory = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, shared_fd, 0);
  MUST(memory != MAP_FAILED);
  close(shared_fd);
  arrive();
  wait_go();
  while (__atomic_load_n(&memory[1], __ATOMIC_SEQ_CST) != 77)
    nap(0.001);
  memory[2] = 78;
}

static void shared_object(void) {
  open_board();
  shared_fd = memfd_create("shared", MFD_CLOEXEC);
  MUST(shared_fd >= 0 && !ftruncate(shared_fd, 1 << 20));
  uint64_t *memory = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, shared_fd, 0);
  fill(memory, 1 << 20, 6);
  pid_t pid = child(maps_anew, 0);
  await_arrivals(1);
  cut();
  CHECK(filled(memory, 1 << 20, 6));
  __atomic_store_n(&memory[1], 77, __ATOMIC_SEQ_CST);
  await(pid, 0);
  EQUAL(memory[2], 78);
}

static void shared_file(void) {
  open_board();
  shared_fd = open(path_of("shared"), O_RDWR | O_CREAT, 0600);
  MUST(shared_fd >= 0 && !ftruncate(shared_fd, 1 << 20));
  uint64_t *memory = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, shared_fd, 0);
  fill(memory, 1 << 20, 8);
  pid_t pid = child(maps_anew, 0);
  await_arrivals(1);
  cut();
  CHECK(filled(memory, 1 << 20, 8));
  __atomic_store_n(&memory[1], 77, __ATOMIC_SEQ_CST);
  await(pid, 0);
  EQUAL(memory[2], 78);
}

// --- memory that was copied on write

#define LARGE (32ul << 20)
static char *large;

static void changes_part(long n) {
  fill(large + n * (1 << 20), 1 << 20, 100 + n);
  arrive();
  wait_go();
  for (long i = 0; i < (long)(LARGE >> 20); i++)
    CHECK(filled(large + i * (1 << 20), 1 << 20, i == n ? 100 + n : i));
}

static void copied_on_write(void) {
  open_board();
  large = map_anon(LARGE);
  for (long i = 0; i < (long)(LARGE >> 20); i++)
    fill(large + i * (1 << 20), 1 << 20, i);
  pid_t pids[4];
  for (long i = 0; i < 4; i++)
    pids[i] = child(changes_part, i * 3);
  await_arrivals(4);
  fill(large + (20 << 20), 1 << 20, 999);
  cut();
  for (long i = 0; i < (long)(LARGE >> 20); i++)
    CHECK(filled(large + i * (1 << 20), 1 << 20, i == 20 ? 999 : i));
  for (int i = 0; i < 4; i++)
    await(pids[i], 0);
}

// --- memory that remains in common

// Pages of these that others have too, by copy on write.
static long in_common(const char *at, size_t bytes) {
  long common = 0;
  int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  MUST(map >= 0);
  for (size_t i = 0; i < bytes / PAGE; i++) {
    uint64_t entry;
    MUST(pread(map, &entry, 8, ((uintptr_t)at / PAGE + i) * 8) == 8);
    common += entry >> 63 && !(entry >> 56 & 1);
  }
  close(map);
  return common;
}

#define PART (4ul << 20)
#define WORDS_OF_A_PAGE (PAGE / 8)
static char *parts[6];

static void expect_parts(long first, long last) {
  for (long i = first; i <= last; i++) {
    CHECK(filled(parts[i], PART, 1000 * i));
    EQUAL(in_common(parts[i], PART), PART / PAGE);
  }
}

// What one of the four has in common with others it has no more once they have ended.
static void all_have_looked(void) {
  arrive();
  await_arrivals(3 + 4);
}

// Has the first four parts from its parent, and the fifth from its grandparent too.
static void grandchild(long unused) {
  (void)unused;
  MUST(!munmap(parts[5], PART));
  arrive();
  wait_go();
  expect_parts(1, 3);
  CHECK(filled(parts[4], PART, 77));
  EQUAL(in_common(parts[4], PART), PART / PAGE);
  all_have_looked();
}

static void heir(long unused) {
  (void)unused;
  fill(parts[4], PART, 77);
  pid_t pid = child(grandchild, 0);
  // What is its own, dropped, protected, unmapped in the middle, and moved.
  fill(parts[0] + PART / 2, PART / 4, 5);
  MUST(!madvise(parts[0] + 16 * PAGE, 16 * PAGE, MADV_DONTNEED));
  MUST(!mprotect(parts[1], PART, PROT_READ));
  MUST(!munmap(parts[5] + PART / 2, 16 * PAGE));
  char *moved = mremap(parts[5] + 3 * PART / 4, 16 * PAGE, 16 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, parts[5] + PART / 2);
  MUST(moved == parts[5] + PART / 2);
  arrive();
  await_arrivals(3);
  wait_go();
  CHECK(filled(parts[0], 16 * PAGE, 0) && all_zero(parts[0] + 16 * PAGE, 16 * PAGE));
  CHECK(filled(parts[0] + PART / 2, PART / 4, 5));
  CHECK(filled(parts[0] + 3 * PART / 4, PART / 4, 3 * PART / 4 / 8));
  expect_parts(1, 3);
  CHECK(filled(parts[4], PART, 77) && filled(moved, 16 * PAGE, 5000 + 3 * PART / 4 / 8));
  CHECK(filled(parts[5], PART / 2, 5000));
  all_have_looked();
  await(pid, 0);
}

static void other_heir(long unused) {
  (void)unused;
  // Others have it, and it would be inherited.
  MUST(!madvise(parts[5], 16 * PAGE, MADV_DONTNEED));
  fill(parts[5] + 16 * PAGE, 16 * PAGE, 9);
  arrive();
  await_arrivals(3);
  wait_go();
  CHECK(filled(parts[0], PART, 0));
  expect_parts(1, 4);
  CHECK(all_zero(parts[5], 16 * PAGE) && filled(parts[5] + 16 * PAGE, 16 * PAGE, 9));
  CHECK(filled(parts[5] + 32 * PAGE, PART - 32 * PAGE, 5000 + 32 * WORDS_OF_A_PAGE));
  all_have_looked();
}

static void inherited(void) {
  open_board();
  for (long i = 0; i < 6; i++) {
    // Apart, each a mapping.
    parts[i] = (char *)map_anon(2 * PART) + PART / 2;
    MUST(!munmap(parts[i] - PART / 2, PART / 2) && !munmap(parts[i] + PART, PART / 2));
    fill(parts[i], PART, 1000 * i);
  }
  pid_t pids[] = {child(heir, 0), child(other_heir, 0)};
  await_arrivals(3);
  // Dropped by the parent while others have it.
  MUST(!madvise(parts[0], PART / 4, MADV_DONTNEED));
  cut();
  CHECK(all_zero(parts[0], PART / 4) && filled(parts[0] + PART / 4, 3 * PART / 4, PART / 4 / 8));
  expect_parts(1, 3);
  all_have_looked();
  for (int i = 0; i < 2; i++)
    await(pids[i], 0);
}

// --- pipes, sockets, offsets, locks

static int there[2], back[2];

static void echoes(long unused) {
  (void)unused;
  close(there[1]);
  close(back[0]);
  arrive();
  char buffer[256];
  ssize_t n;
  wait_go();
  while ((n = read(there[0], buffer, sizeof buffer)) > 0)
    CHECK(write(back[1], buffer, n) == n);
  EQUAL(n, 0);
}

static void pipes(void) {
  open_board();
  MUST(!pipe(there) && !pipe(back));
  pid_t pid = child(echoes, 0);
  close(there[0]);
  close(back[1]);
  await_arrivals(1);
  MUST(write(there[1], "in the pipe", 11) == 11);
  cut();
  char buffer[256] = {0};
  EQUAL(read(back[0], buffer, sizeof buffer), 11);
  CHECK(!strcmp(buffer, "in the pipe"));
  close(there[1]);
  EQUAL(read(back[0], buffer, sizeof buffer), 0);
  await(pid, 0);
}

static void answers(long kind) {
  close(there[0]);
  arrive();
  wait_go();
  char buffer[64];
  for (int i = 0; i < 3; i++) {
    ssize_t n = recv(there[1], buffer, sizeof buffer, 0);
    EQUAL(n, kind == SOCK_STREAM ? 18 : 6);
    CHECK(send(there[1], buffer, n, 0) == n);
    if (kind == SOCK_STREAM)
      break;
  }
}

static void socket_pairs(void) {
  open_board();
  int kinds[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET}, own_ends[3];
  pid_t pids[3];
  for (int i = 0; i < 3; i++) {
    MUST(!socketpair(AF_UNIX, kinds[i], 0, there));
    pids[i] = child(answers, kinds[i]);
    close(there[1]);
    own_ends[i] = there[0];
    for (int k = 0; k < 3; k++)
      MUST(send(own_ends[i], "queued", 6, 0) == 6);
  }
  await_arrivals(3);
  cut();
  for (int i = 0; i < 3; i++) {
    int rounds = kinds[i] == SOCK_STREAM ? 1 : 3;
    for (int k = 0; k < rounds; k++) {
      char buffer[64];
      EQUAL(recv(own_ends[i], buffer, sizeof buffer, 0), rounds == 1 ? 18 : 6);
    }
    await(pids[i], 0);
  }
}

static struct sockaddr_un name_of_listener(void) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  snprintf(address.sun_path, sizeof address.sun_path, "%.100s", path_of("door"));
  return address;
}

static void connects(long unused) {
  (void)unused;
  struct sockaddr_un address = name_of_listener();
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  MUST(!connect(fd, (void *)&address, sizeof address));
  MUST(write(fd, "hello", 5) == 5);
  char buffer[16] = {0};
  MUST(read(fd, buffer, 2) == 2);
  arrive();
  wait_go();
  EQUAL(write(fd, "again", 5), 5);
  EQUAL(read(fd, buffer, sizeof buffer), 3);
  CHECK(!memcmp(buffer, "bye", 3));
}

static void accepted(void) {
  open_board();
  if (strlen(path_of("door")) > 100)
    SKIP("the directory's name is too long for a socket");
  struct sockaddr_un address = name_of_listener();
  int door = socket(AF_UNIX, SOCK_STREAM, 0);
  MUST(!bind(door, (void *)&address, sizeof address) && !listen(door, 5));
  pid_t pid = child(connects, 0);
  int fd = accept(door, 0, 0);
  char buffer[16];
  MUST(read(fd, buffer, 5) == 5 && write(fd, "ok", 2) == 2);
  await_arrivals(1);
  cut();
  EQUAL(read(fd, buffer, sizeof buffer), 5);
  CHECK(!memcmp(buffer, "again", 5));
  EQUAL(write(fd, "bye", 3), 3);
  await(pid, 0);
}

static void reads_on(long unused) {
  (void)unused;
  arrive();
  while (__atomic_load_n(&board->words[0], __ATOMIC_SEQ_CST) == 0)
    nap(0.001);
  char buffer[10];
  EQUAL(read(shared_fd, buffer, 10), 10);
  CHECK(!memcmp(buffer, "klmnopqrst", 10));
  EQUAL(fcntl(shared_fd, F_GETFD), FD_CLOEXEC);
}

static void shared_offset(void) {
  open_board();
  shared_fd = open(path_of("letters"), O_RDWR | O_CREAT, 0600);
  MUST(write(shared_fd, "abcdefghijklmnopqrstuvwxyz", 26) == 26 && lseek(shared_fd, 5, SEEK_SET) == 5);
  MUST(!fcntl(shared_fd, F_SETFD, FD_CLOEXEC));
  pid_t pid = child(reads_on, 0);
  MUST(!fcntl(shared_fd, F_SETFD, 0));
  await_arrivals(1);
  cut();
  char buffer[5];
  EQUAL(read(shared_fd, buffer, 5), 5);
  CHECK(!memcmp(buffer, "fghij", 5));
  __atomic_store_n(&board->words[0], 1, __ATOMIC_SEQ_CST);
  await(pid, 0);
  EQUAL(lseek(shared_fd, 0, SEEK_CUR), 20);
  EQUAL(fcntl(shared_fd, F_GETFD), 0);
}

static struct flock range(short type, off_t start, off_t length) {
  return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
}

static void locks_own(long start) {
  struct flock lock = range(F_WRLCK, start, 10);
  MUST(!fcntl(shared_fd, F_SETLK, &lock));
  arrive();
  wait_go();
  while (__atomic_load_n(&board->words[0], __ATOMIC_SEQ_CST) == 0)
    nap(0.001);
}

static void locks(void) {
  open_board();
  shared_fd = open(path_of("locked"), O_RDWR | O_CREAT, 0600);
  int other = open(path_of("locked"), O_RDWR);
  MUST(shared_fd >= 0 && other >= 0 && !ftruncate(shared_fd, 1000));
  struct flock lock = range(F_WRLCK, 0, 10);
  MUST(!fcntl(shared_fd, F_SETLK, &lock));
  pid_t pids[3];
  for (int i = 0; i < 3; i++)
    pids[i] = child(locks_own, 100 * (i + 1));
  await_arrivals(3);
  MUST(!flock(other, LOCK_EX | LOCK_NB));
  cut();
  for (int i = 0; i < 3; i++) {
    lock = range(F_WRLCK, 100 * (i + 1), 10);
    MUST(!fcntl(shared_fd, F_GETLK, &lock));
    EQUAL(lock.l_type, F_WRLCK);
    EQUAL(lock.l_pid, pids[i]);
    EQUAL(lock.l_len, 10);
  }
  int third = open(path_of("locked"), O_RDWR);
  CHECK(flock(third, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
  __atomic_store_n(&board->words[0], 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < 3; i++)
    await(pids[i], 0);
  lock = range(F_WRLCK, 100, 500);
  EQUAL(fcntl(shared_fd, F_SETLK, &lock), 0);
}

// A lock that a child waits for.
static void waits_for_lock(long unused) {
  (void)unused;
  int fd = open(path_of("locked"), O_RDWR);
  arrive();
  struct flock lock = range(F_WRLCK, 0, 10);
  EQUAL(fcntl(fd, F_SETLKW, &lock), 0);
  EQUAL(__atomic_load_n(&board->words[0], __ATOMIC_SEQ_CST), 1);
}

static void lock_waiter(void) {
  open_board();
  shared_fd = open(path_of("locked"), O_RDWR | O_CREAT, 0600);
  struct flock lock = range(F_WRLCK, 0, 10);
  MUST(!fcntl(shared_fd, F_SETLK, &lock));
  pid_t pid = child(waits_for_lock, 0);
  await_arrivals(1);
  nap(0.02);
  cut();
  nap(0.02);
  EQUAL(waitpid(pid, 0, WNOHANG), 0);
  __atomic_store_n(&board->words[0], 1, __ATOMIC_SEQ_CST);
  lock = range(F_UNLCK, 0, 10);
  EQUAL(fcntl(shared_fd, F_SETLK, &lock), 0);
  await(pid, 0);
}

// --- objects of the kernel

static int poller, counter, ticker, watcher, signals, handle;

static void uses_objects(long unused) {
  (void)unused;
  arrive();
  wait_go();
  uint64_t value = 0;
  EQUAL(read(counter, &value, 8), 8);
  EQUAL(value, 41);
  struct epoll_event event = {0};
  EQUAL(epoll_wait(poller, &event, 1, 0), 1);
  EQUAL(event.data.u64, 4711);
  EQUAL(fcntl(handle, F_GETFD), 0);
  siginfo_t info;
  // It is a handle to ourselves.
  EQUAL(syscall(SYS_pidfd_send_signal, handle, 0, 0, 0), 0);
  CHECK(waitid((idtype_t)3 /* P_PIDFD */, handle, &info, WEXITED | WNOHANG) < 0 && errno == ECHILD);
  value = 5;
  EQUAL(write(counter, &value, 8), 8);
}

static void objects(void) {
  open_board();
  counter = eventfd(41, 0);
  ticker = timerfd_create(CLOCK_MONOTONIC, 0);
  struct itimerspec far = {.it_value = {1000, 0}};
  MUST(!timerfd_settime(ticker, 0, &far, 0));
  watcher = inotify_init1(IN_NONBLOCK);
  MUST(inotify_add_watch(watcher, directory, IN_DELETE) > 0);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  signals = signalfd(-1, &set, 0);
  MUST(!pipe(there));
  poller = epoll_create1(0);
  struct epoll_event event = {.events = EPOLLIN, .data.u64 = 4711};
  MUST(!epoll_ctl(poller, EPOLL_CTL_ADD, there[0], &event));
  MUST(write(there[1], "x", 1) == 1);
  int go[2];
  MUST(!pipe(go));
  handle = 300;
  pid_t pid = fork();
  if (!pid) {
    char byte;
    MUST(read(go[0], &byte, 1) == 1);
    int own_handle = syscall(SYS_pidfd_open, getpid(), 0);
    MUST(dup2(own_handle, handle) == handle);
    close(own_handle);
    close(there[0]); // the epoll watches it all the same, as the parent has it open
    uses_objects(0);
    ends();
  }
  int mine = syscall(SYS_pidfd_open, pid, 0);
  MUST(write(go[1], "g", 1) == 1);
  await_arrivals(1);
  cut();
  await(pid, 0);
  siginfo_t info = {0};
  struct pollfd poll_handle = {mine, POLLIN, 0};
  EQUAL(poll(&poll_handle, 1, 1000), 1);
  (void)info;
  uint64_t value = 0;
  EQUAL(read(counter, &value, 8), 8);
  EQUAL(value, 5);
  struct itimerspec left;
  EQUAL(timerfd_gettime(ticker, &left), 0);
  CHECK(left.it_value.tv_sec > 900);
}

// A handle that parent and child share.
static void shared_handle(long unused) {
  (void)unused;
  arrive();
  wait_go();
  EQUAL(syscall(SYS_pidfd_send_signal, handle, 0, 0, 0), 0);
}

static void handles(void) {
  open_board();
  pid_t first = child(until_go, 0);
  handle = syscall(SYS_pidfd_open, first, 0);
  pid_t second = child(shared_handle, 0);
  await_arrivals(2);
  cut();
  await(second, 0);
  siginfo_t info = {0};
  EQUAL(waitid((idtype_t)3, handle, &info, WEXITED), 0);
  EQUAL(info.si_pid, first);
}

static int proc_of_other, proc_of_self;

static void holds_proc(long unused) {
  (void)unused;
  arrive();
  wait_go();
  char text[512] = {0};
  int pid = 0;
  lseek(proc_of_other, 0, SEEK_SET);
  CHECK(read(proc_of_other, text, sizeof text - 1) > 0);
  EQUAL(sscanf(text, "%d", &pid), 1);
  EQUAL(pid, getppid());
}

static void proc_files(void) {
  open_board();
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/stat", getpid());
  proc_of_other = open(path, O_RDONLY);
  pid_t pid = child(holds_proc, 0);
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  proc_of_self = open(path, O_RDONLY);
  await_arrivals(1);
  cut();
  char text[512] = {0};
  int found = 0;
  lseek(proc_of_self, 0, SEEK_SET);
  CHECK(read(proc_of_self, text, sizeof text - 1) > 0);
  EQUAL(sscanf(text, "%d", &found), 1);
  EQUAL(found, pid);
  await(pid, 0);
}

static void asynchronous(void) {
  open_board();
  MUST(!pipe(there));
  pid_t pid = child(until_go, 0);
  await_arrivals(1);
  MUST(!fcntl(there[0], F_SETOWN, pid) && !fcntl(there[0], F_SETSIG, SIGRTMIN));
  cut();
  EQUAL(fcntl(there[0], F_GETOWN), pid);
  EQUAL(fcntl(there[0], F_GETSIG), SIGRTMIN);
  await(pid, 0);
}

// --- what each has alone

static void is_nobody(long unused) {
  (void)unused;
  MUST(!chdir("/"));
  umask(0123);
  struct rlimit limit = {100, 200};
  MUST(!setrlimit(RLIMIT_NOFILE, &limit));
  MUST(!setgid(65534) && !setuid(65534));
  MUST(!prctl(PR_SET_DUMPABLE, 1));
  arrive();
  while (__atomic_load_n(&board->words[0], __ATOMIC_SEQ_CST) == 0)
    nap(0.001);
  EQUAL(getuid(), 65534);
  EQUAL(umask(0), 0123);
  MUST(!getrlimit(RLIMIT_NOFILE, &limit));
  EQUAL(limit.rlim_cur, 100);
  char here[256];
  CHECK(getcwd(here, sizeof here) && !strcmp(here, "/"));
}

static void alone(void) {
  if (getuid())
    SKIP("only root can become somebody else");
  open_board();
  pid_t pid = child(is_nobody, 0);
  await_arrivals(1);
  cut();
  __atomic_store_n(&board->words[0], 1, __ATOMIC_SEQ_CST);
  await(pid, 0);
  EQUAL(getuid(), 0);
}

static void dies_with_parent(long unused) {
  (void)unused;
  MUST(!prctl(PR_SET_PDEATHSIG, SIGKILL));
  arrive();
  for (;;)
    pause();
}

static void middle_parent(long unused) {
  (void)unused;
  board->words[1] = child(dies_with_parent, 0);
  await_arrivals(1);
  wait_go();
}

static void parent_death(void) {
  open_board();
  MUST(!prctl(PR_SET_CHILD_SUBREAPER, 1));
  pid_t pid = child(middle_parent, 0);
  await_arrivals(1);
  nap(0.01);
  cut();
  await(pid, 0);
  await(board->words[1], SIGKILL);
}

static void sleeps(long ms) {
  double before = now();
  arrive();
  struct timespec t = timespec_of(ms / 1e3);
  EQUAL(nanosleep(&t, 0), 0);
  double took = now() - before;
  CHECK(took > ms / 1e3 - 0.001);
}

static void sleeping(void) {
  open_board();
  pid_t pids[4];
  for (int i = 0; i < 4; i++)
    pids[i] = child(sleeps, 1500 + 100 * i);
  await_arrivals(4);
  ready();
  for (int i = 0; i < 4; i++)
    await(pids[i], 0);
  wait_go();
}

// --- terminals

static int terminal;

static void on_terminal(long unused) {
  (void)unused;
  MUST(setsid() == getpid());
  MUST(!ioctl(terminal, TIOCSCTTY, 0));
  pid_t group = child(in_group, 0);
  MUST(!setpgid(group, group) || errno == EACCES);
  signal(SIGTTOU, SIG_IGN);
  MUST(!tcsetpgrp(terminal, group));
  await_arrivals(1);
  arrive();
  wait_go();
  EQUAL(tcgetsid(terminal), getpid());
  EQUAL(tcgetpgrp(terminal), group);
  int fd = open("/dev/tty", O_RDWR);
  CHECK(fd >= 0);
  EQUAL(write(fd, "on the tty", 10), 10);
  await(group, 0);
}

static void terminals(void) {
  open_board();
  int master = posix_openpt(O_RDWR | O_NOCTTY);
  MUST(master >= 0 && !grantpt(master) && !unlockpt(master));
  terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
  struct winsize size = {33, 77, 0, 0};
  MUST(!ioctl(master, TIOCSWINSZ, &size));
  pid_t pid = child(on_terminal, 0);
  close(terminal);
  await_arrivals(2);
  cut();
  char buffer[64] = {0};
  EQUAL(read(master, buffer, sizeof buffer), 10);
  CHECK(!memcmp(buffer, "on the tty", 10));
  EQUAL(ioctl(master, TIOCGWINSZ, &size), 0);
  EQUAL(size.ws_col, 77);
  await(pid, 0);
}

// --- one instant for all

// Two processes take turns: neither is ever more than one turn ahead.
static void takes_turns(long unused) {
  (void)unused;
  close(there[1]);
  close(back[0]);
  uint64_t n = 0, got;
  while (read(there[0], &got, 8) == 8) {
    EQUAL(got, n + 1);
    n = got;
    if (write(back[1], &n, 8) != 8)
      break;
  }
}

static void turns(void) {
  open_board();
  MUST(!pipe(there) && !pipe(back));
  pid_t pid = child(takes_turns, 0);
  close(there[0]);
  close(back[1]);
  ready();
  uint64_t n = 0, got;
  while (!gone()) {
    n++;
    MUST(write(there[1], &n, 8) == 8);
    CHECK(read(back[0], &got, 8) == 8);
    EQUAL(got, n);
    if (failures)
      break;
  }
  close(there[1]);
  await(pid, 0);
}

// A counter in private memory of each of several processes, moved on one after the other by a token in shared memory.
static void passes_token(long n) {
  uint64_t mine = 0;
  for (;;) {
    uint32_t *token = (uint32_t *)&board->words[100];
    while (__atomic_load_n(token, __ATOMIC_ACQUIRE) % 4 != (uint32_t)n) {
      if (__atomic_load_n(&board->words[101], __ATOMIC_ACQUIRE))
        return;
      sched_yield();
      give_way(0.00005);
    }
    EQUAL(__atomic_load_n(token, __ATOMIC_ACQUIRE), mine * 4 + n);
    if (failures)
      return;
    mine++;
    __atomic_add_fetch(token, 1, __ATOMIC_RELEASE);
  }
}

static void token(void) {
  open_board();
  pid_t pids[4];
  for (long i = 0; i < 4; i++)
    pids[i] = child(passes_token, i);
  ready();
  long before = board->words[100];
  wait_go();
  nap(0.05);
  CHECK(board->words[100] != before);
  __atomic_store_n(&board->words[101], 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < 4; i++)
    await(pids[i], 0);
}

// --- who comes and goes

static void begins_others(long how) {
  char *nothing[] = {"true", 0};
  for (int i = 0; !gone(); i++) {
    pid_t pid;
    if (how == 0) {
      pid = fork();
      if (!pid) {
        if (i % 3 == 0) {
          pid_t deeper = fork();
          if (!deeper)
            _exit(i % 100);
          int status;
          if (waitpid(deeper, &status, 0) != deeper || WEXITSTATUS(status) != i % 100)
            _exit(200);
        }
        _exit(i % 100);
      }
    } else {
      MUST(!posix_spawnp(&pid, "true", 0, 0, nothing, environ));
    }
    MUST(pid > 0);
    int status = -1;
    EQUAL(waitpid(pid, &status, 0), pid);
    EQUAL(status, how ? 0 : (i % 100) << 8);
    give_way(how ? 0.005 : 0.001);
    if (failures)
      return;
  }
}

static void forks(void) {
  pid_t pids[3];
  for (int i = 0; i < 3; i++)
    pids[i] = child(begins_others, 0);
  ready();
  wait_go();
  for (int i = 0; i < 3; i++)
    await(pids[i], 0);
}

static void spawns(void) {
  pid_t pids[3];
  for (int i = 0; i < 3; i++)
    pids[i] = child(begins_others, 1);
  ready();
  wait_go();
  for (int i = 0; i < 3; i++)
    await(pids[i], 0);
}

static void *forking_thread(void *unused) {
  (void)unused;
  begins_others(0);
  return 0;
}

static void forking_threads(void) {
  pthread_t threads[4];
  for (int i = 0; i < 4; i++)
    threads[i] = spawn(forking_thread, 0);
  ready();
  wait_go();
  for (int i = 0; i < 4; i++)
    pthread_join(threads[i], 0);
}

// --- stopped by job control

static void stopped_by_signals(void) {
  static const int signals[] = {SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU};
  pid_t pids[4];
  siginfo_t told;
  for (int i = 0; i < 4; i++) {
    pids[i] = fork();
    MUST(pids[i] >= 0);
    if (!pids[i]) {
      setpgid(0, 0);
      for (;;)
        pause();
    }
    setpgid(pids[i], pids[i]);
    MUST(!kill(pids[i], signals[i]) && !waitid(P_PID, pids[i], &told, WSTOPPED | WNOWAIT));
  }
  cut();
  for (int i = 0; i < 4; i++) {
    EQUAL(waitid(P_PID, pids[i], &told, WSTOPPED), 0);
    EQUAL(told.si_code, CLD_STOPPED);
    EQUAL(told.si_status, signals[i]);
    EQUAL(kill(pids[i], SIGCONT), 0);
    EQUAL(waitid(P_PID, pids[i], &told, WCONTINUED), 0);
    EQUAL(told.si_code, CLD_CONTINUED);
    kill(pids[i], SIGKILL);
    await(pids[i], SIGKILL);
  }
}

// What a parent is told of a stop, it is told once; of what it does not know, it still hears.

static volatile int continues;

static void note_continue(int signal) {
  (void)signal;
  continues++;
}

// Is told to go on so many times.
static void goes_on(long times) {
  signal(SIGCONT, note_continue);
  for (int i = 0; i < 3 && getpid() % 2; i++)
    spawn(pauses, 0);
  until_word(0);
  // Another thread may have been given the signal, and not yet have run.
  for (int i = 0; i < 20000 && continues < times; i++)
    nap(0.001);
  EQUAL(continues, times);
}

static void told_stops(void) {
  open_board();
  struct sigaction action = {.sa_handler = tell, .sa_flags = SA_RESTART};
  sigaction(SIGCHLD, &action, 0);
  pid_t pids[6];
  siginfo_t about;
  for (int i = 0; i < 6; i++)
    pids[i] = child(goes_on, 1);
  await_arrivals(6);
  for (int i = 0; i < 6; i++)
    MUST(!kill(pids[i], SIGSTOP) && !waitid(P_PID, pids[i], &about, WSTOPPED | (i == 1 ? WNOWAIT : 0)));
  for (int i = 2; i < 5; i++)
    MUST(!kill(pids[i], SIGCONT) && !waitid(P_PID, pids[i], &about, WCONTINUED | (i < 4 ? WNOWAIT : 0)));
  nap(0.05);
  int before = told;
  cut();
  nap(0.05);
  EQUAL(told, before);
  static const int codes[] = {0, CLD_STOPPED, CLD_CONTINUED, CLD_CONTINUED, 0, 0};
  for (int i = 0; i < 6; i++) {
    about.si_pid = 0;
    EQUAL(waitid(P_PID, pids[i], &about, WSTOPPED | WCONTINUED | WNOHANG), 0);
    EQUAL(about.si_pid, codes[i] ? pids[i] : 0);
    if (codes[i])
      EQUAL(about.si_code, codes[i]);
    EQUAL(told, before);
  }
  for (int i = 0; i < 6; i++)
    if (i < 2 || i == 5)
      kill(pids[i], SIGCONT);
  nap(0.05);
  __atomic_store_n(&board->words[0], 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < 6; i++)
    await(pids[i], 0);
}

// Goes on after a stop with signals of job control that it has not yet taken, of the process or of its main thread.
static void goes_on_with(long kind) {
  int pending[] = {SIGCONT, SIGTSTP, SIGTTIN};
  int waits = pending[kind % 3];
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, waits);
  MUST(!sigprocmask(SIG_BLOCK, &set, 0));
  until_word(0);
  siginfo_t info;
  struct timespec at_once = {0, 0};
  EQUAL(sigtimedwait(&set, &info, &at_once), waits);
  CHECK(sigtimedwait(&set, &info, &at_once) < 0 && errno == EAGAIN);
}

// More children than are asked about at a time; some of them go on after a stop of which nobody has been told.
static void told_of_many(void) {
  enum { MANY = 70 };
  open_board();
  pid_t pids[MANY];
  siginfo_t about;
  for (int i = 0; i < MANY; i++)
    pids[i] = child(goes_on_with, i);
  await_arrivals(MANY);
  for (int i = 0; i < MANY; i++) {
    if (i % 2) {
      MUST(!kill(pids[i], SIGSTOP) && !waitid(P_PID, pids[i], &about, WSTOPPED));
      MUST(!kill(pids[i], SIGCONT) && !waitid(P_PID, pids[i], &about, WCONTINUED | (i % 4 == 1 ? WNOWAIT : 0)));
    } else if (i % 3 == 0) {
      MUST(!kill(pids[i], SIGCONT));
    }
    if (i % 3)
      MUST(!kill(pids[i], i % 3 == 1 ? SIGTSTP : SIGTTIN));
  }
  cut();
  for (int i = 0; i < MANY; i++) {
    about.si_pid = 0;
    EQUAL(waitid(P_PID, pids[i], &about, WSTOPPED | WCONTINUED | WNOHANG), 0);
    EQUAL(about.si_pid, i % 4 == 1 ? pids[i] : 0);
  }
  __atomic_store_n(&board->words[0], 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < MANY; i++)
    await(pids[i], 0);
}

// --- waiting for each other

static void waits(void) {
  open_board();
  pid_t pid = child(until_go, 0);
  await_arrivals(1);
  ready();
  int status = -1;
  pid_t got;
  while ((got = wait4(pid, &status, 0, 0)) < 0 && errno == EINTR)
    CHECK(!"interrupted");
  EQUAL(got, pid);
  EQUAL(status, 0);
}

static void chatters(long n) {
  arrive();
  while (!gone()) {
    kill(getppid(), n % 2 ? SIGUSR1 : SIGUSR2);
    nap(0.001);
  }
}

static volatile int heard;

static void hear(int signal) {
  (void)signal;
  heard++;
}

static void signalled(void) {
  open_board();
  signal(SIGUSR1, hear);
  signal(SIGUSR2, hear);
  pid_t pids[4];
  for (int i = 0; i < 4; i++)
    pids[i] = child(chatters, i);
  await_arrivals(4);
  ready();
  wait_go();
  CHECK(heard > 0);
  for (int i = 0; i < 4; i++)
    await(pids[i], 0);
}

// --- descriptor tables and file-system contexts that processes share without being threads

// What a process finds of its own: whether a descriptor of this number is open, its current directory, its umask.
static void expect_context(int fd, int is_open, const char *here, int mask) {
  char path[PATH_MAX];
  EQUAL(fcntl(fd, F_GETFD) >= 0, is_open);
  CHECK(getcwd(path, sizeof path) && !strcmp(path, here));
  int found = umask(0);
  umask(found);
  EQUAL(found, mask);
}

// Says that the child's turn has come, and waits until it is over.
static void let(int turn) {
  __atomic_store_n(&board->words[0], turn, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&board->words[1], __ATOMIC_SEQ_CST) != turn)
    nap(0.001);
}

static void await_turn(int turn) {
  while (__atomic_load_n(&board->words[0], __ATOMIC_SEQ_CST) != turn)
    nap(0.001);
}

static void end_turn(int turn) {
  __atomic_store_n(&board->words[1], turn, __ATOMIC_SEQ_CST);
}

static pid_t sharing_child(int flags, void (*run)(long), long argument) {
  return clone_child(SIGCHLD | flags, run, argument);
}

static int low[2], marked, unmarked;

// Changes everything when its turn comes. Its own child shares it all.
static void changes_context(long turn) {
  arrive();
  await_turn(turn);
  expect_context(marked, 1, directory, 027);
  EQUAL(fcntl(marked, F_GETFD), 0);
  EQUAL(fcntl(unmarked, F_GETFD), FD_CLOEXEC);
  EQUAL(dup2(low[0], 401), 401);
  MUST(!chdir("/usr"));
  umask(033);
  end_turn(turn);
  await_turn(-1);
}

static void has_a_heir(long turn) {
  pid_t pid = sharing_child(CLONE_FILES | CLONE_FS, changes_context, turn);
  arrive();
  await_turn(-1);
  expect_context(401, 1, "/usr", 033);
  await(pid, 0);
}

static void shared_contexts(void) {
  open_board();
  MUST(!pipe(low) && dup2(low[0], 300) == 300 && dup3(low[1], 301, O_CLOEXEC) == 301);
  marked = 300;
  unmarked = 301;
  MUST(!chdir(directory));
  umask(027);
  struct flock lock = range(F_WRLCK, 0, 10);
  shared_fd = open(path_of("locked"), O_RDWR | O_CREAT, 0600);
  MUST(!fcntl(shared_fd, F_SETLK, &lock));
  // Epolls, timers and handles to processes are made late in a restore.
  int watch = epoll_create1(0), self = syscall(SYS_pidfd_open, getpid(), 0);
  struct epoll_event event = {.events = EPOLLIN, .data.u64 = 11};
  MUST(!epoll_ctl(watch, EPOLL_CTL_ADD, low[0], &event));
  pid_t all = sharing_child(CLONE_FILES | CLONE_FS, has_a_heir, 1);
  await_arrivals(2);
  pid_t alone = child(until_word, 0);
  await_arrivals(3);
  cut();
  let(1);
  expect_context(401, 1, "/usr", 033);
  EQUAL(syscall(SYS_pidfd_send_signal, self, 0, 0, 0), 0);
  EQUAL(write(low[1], "x", 1), 1);
  EQUAL(epoll_wait(watch, &event, 1, 0), 1);
  EQUAL(event.data.u64, 11);
  __atomic_store_n(&board->words[0], -1, __ATOMIC_SEQ_CST);
  await(all, 0);
  await(alone, 0);
}

// Each shares one of the two, and changes both.
static void changes_one(long what) {
  arrive();
  await_turn(what);
  if (what == 1)
    expect_context(marked, 1, directory, 027);
  EQUAL(dup2(low[0], 410 + what), 410 + what);
  MUST(!chdir(what == 1 ? "/usr" : "/tmp"));
  end_turn(what);
  await_turn(-1);
  expect_context(411, what == 1, what == 1 ? "/usr" : "/tmp", 027);
}

static void half_shared(void) {
  open_board();
  MUST(!pipe(low) && dup2(low[0], 300) == 300);
  marked = 300;
  MUST(!chdir(directory));
  umask(027);
  pid_t files = sharing_child(CLONE_FILES, changes_one, 1), fs = sharing_child(CLONE_FS, changes_one, 2);
  await_arrivals(2);
  cut();
  let(1);
  expect_context(411, 1, directory, 027);
  let(2);
  expect_context(412, 0, "/tmp", 027);
  __atomic_store_n(&board->words[0], -1, __ATOMIC_SEQ_CST);
  await(files, 0);
  await(fs, 0);
}

// Two children of one that has left what they share; and the other half of it is a grandchild of the root.
static void leaves_context(long unused) {
  (void)unused;
  pid_t first = sharing_child(CLONE_FILES | CLONE_FS, changes_one, 1);
  pid_t second = sharing_child(CLONE_FILES | CLONE_FS, until_word, 0);
  MUST(!unshare(CLONE_FILES | CLONE_FS));
  MUST(!chdir("/"));
  arrive();
  await_turn(-1);
  expect_context(411, 0, "/", 027);
  await(first, 0);
  await(second, 0);
}

static void left_context(void) {
  open_board();
  MUST(!pipe(low) && dup2(low[0], 300) == 300);
  marked = 300;
  MUST(!chdir(directory));
  umask(027);
  pid_t pid = sharing_child(CLONE_FS, leaves_context, 0);
  await_arrivals(3);
  cut();
  let(1);
  expect_context(411, 0, "/usr", 027); // it shares the directory with the first grandchild, but not the descriptors
  __atomic_store_n(&board->words[0], -1, __ATOMIC_SEQ_CST);
  await(pid, 0);
}

// --- threads with directories of their own, and with children of their own

static int turn;

static void *shares_apart(void *unused) {
  (void)unused;
  expect_context(0, 1, "/usr", 033);
  __atomic_add_fetch(&turn, 1, __ATOMIC_SEQ_CST);
  wait_go();
  expect_context(0, 1, "/usr", 033);
  MUST(!chdir("/etc"));
  umask(011);
  __atomic_add_fetch(&turn, 100, __ATOMIC_SEQ_CST);
  return 0;
}

static void *goes_apart(void *unused) {
  (void)unused;
  MUST(!unshare(CLONE_FS) && !chdir("/usr"));
  umask(033);
  pthread_t second = spawn(shares_apart, 0);
  wait_go();
  pthread_join(second, 0);
  expect_context(0, 1, "/etc", 011);
  return 0;
}

static void *another_apart(void *unused) {
  (void)unused;
  MUST(!unshare(CLONE_FS) && !chdir("/tmp"));
  __atomic_add_fetch(&turn, 10, __ATOMIC_SEQ_CST);
  wait_go();
  expect_context(0, 1, "/tmp", 027);
  while (__atomic_load_n(&turn, __ATOMIC_SEQ_CST) < 1000)
    nap(0.001);
  expect_context(0, 1, "/tmp", 027);
  return 0;
}

static void *stays_together(void *unused) {
  (void)unused;
  wait_go();
  while (__atomic_load_n(&turn, __ATOMIC_SEQ_CST) < 100)
    nap(0.001);
  MUST(!chdir("/"));
  __atomic_add_fetch(&turn, 1000, __ATOMIC_SEQ_CST);
  return 0;
}

static void apart(void) {
  MUST(!chdir(directory));
  umask(027);
  pthread_t threads[] = {spawn(goes_apart, 0), spawn(another_apart, 0), spawn(stays_together, 0)};
  while (__atomic_load_n(&turn, __ATOMIC_SEQ_CST) != 11)
    nap(0.001);
  cut();
  while (__atomic_load_n(&turn, __ATOMIC_SEQ_CST) < 1000)
    nap(0.001);
  expect_context(0, 1, "/", 027);
  for (int i = 0; i < 3; i++)
    pthread_join(threads[i], 0);
}

static pid_t of_thread[3];

static void waits_for_death(long unused) {
  (void)unused;
  MUST(!prctl(PR_SET_PDEATHSIG, SIGTERM));
  arrive();
  for (;;)
    pause();
}

static void *has_children(void *unused) {
  (void)unused;
  of_thread[0] = child(waits_for_death, 0);
  of_thread[1] = child(until_word, 0);
  of_thread[2] = child(end, 4);
  siginfo_t info;
  MUST(!waitid(P_PID, of_thread[2], &info, WEXITED | WNOWAIT));
  arrive();
  wait_go();
  while (!__atomic_load_n(&turn, __ATOMIC_SEQ_CST))
    nap(0.001);
  int status = -1;
  EQUAL(waitpid(of_thread[2], &status, __WNOTHREAD), of_thread[2]);
  EQUAL(status, 4 << 8);
  EQUAL(waitpid(of_thread[0], &status, __WNOTHREAD | WNOHANG), 0);
  __atomic_store_n(&board->words[0], 1, __ATOMIC_SEQ_CST);
  EQUAL(waitpid(of_thread[1], &status, __WNOTHREAD), of_thread[1]);
  EQUAL(status, 0);
  return 0; // and the first one is told
}

static void *has_dead_child(void *unused) {
  (void)unused;
  pid_t pid = child(end, 4);
  await_zombie(pid);
  __atomic_store_n(&turn, 1, __ATOMIC_SEQ_CST);
  wait_go();
  int status = -1;
  EQUAL(waitpid(pid, &status, __WNOTHREAD), pid);
  EQUAL(status, 4 << 8);
  return 0;
}

static void thread_zombie(void) {
  pthread_t thread = spawn(has_dead_child, 0);
  while (!__atomic_load_n(&turn, __ATOMIC_SEQ_CST))
    nap(0.001);
  cut();
  CHECK(waitpid(-1, 0, __WNOTHREAD | WNOHANG) < 0 && errno == ECHILD);
  pthread_join(thread, 0);
}

static void thread_children(void) {
  open_board();
  pthread_t thread = spawn(has_children, 0);
  await_arrivals(3);
  pid_t own = child(until_word, 0);
  await_arrivals(4);
  cut();
  for (int i = 0; i < 3; i++)
    CHECK(waitpid(of_thread[i], 0, __WNOTHREAD | WNOHANG) < 0 && errno == ECHILD);
  EQUAL(waitpid(own, 0, __WNOTHREAD | WNOHANG), 0);
  __atomic_store_n(&turn, 1, __ATOMIC_SEQ_CST);
  pthread_join(thread, 0);
  await(of_thread[0], SIGTERM);
  await(own, 0);
}

SCENARIOS({"pair", pair}, {"shared_contexts", shared_contexts}, {"half_shared", half_shared}, {"left_context", left_context}, {"apart", apart}, {"thread_children", thread_children}, {"thread_zombie", thread_zombie},
          {"lost_session", lost_session}, {"dead_session", dead_session}, {"left_session", left_session}, {"generations", generations}, {"many", many}, {"programs", programs}, {"ended", ended},
          {"ended_pending", ended_pending}, {"exit_signals", exit_signals}, {"nobody_waits", nobody_waits},
          {"sessions", sessions}, {"groups", groups}, {"leaderless", leaderless}, {"dead_leader", dead_leader},
          {"orphans", orphans}, {"stopped", stopped}, {"stopped_by_signals", stopped_by_signals}, {"told_stops", told_stops}, {"told_of_many", told_of_many}, {"shared_memory", shared_memory},
          {"shared_object", shared_object}, {"shared_file", shared_file}, {"copied_on_write", copied_on_write}, {"inherited", inherited},
          {"pipes", pipes}, {"socket_pairs", socket_pairs}, {"accepted", accepted}, {"shared_offset", shared_offset},
          {"locks", locks}, {"lock_waiter", lock_waiter}, {"objects", objects}, {"handles", handles},
          {"proc_files", proc_files}, {"asynchronous", asynchronous}, {"alone", alone},
          {"parent_death", parent_death}, {"sleeping", sleeping}, {"terminals", terminals}, {"turns", turns},
          {"token", token}, {"forks", forks}, {"spawns", spawns}, {"forking_threads", forking_threads},
          {"waits", waits}, {"signalled", signalled})
