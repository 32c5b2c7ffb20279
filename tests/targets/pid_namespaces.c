// Processes of a tree in pid namespaces that they made: who has which ids where, and what is told by them.
#include "family.h"
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

// As process 1 of a new namespace.
static pid_t first(void (*run)(long), long argument) {
  return child_in(CLONE_NEWPID, run, argument);
}

static void enter_for_children(pid_t pid) {
  int handle = syscall(SYS_pidfd_open, pid, 0);
  MUST(handle >= 0 && !setns(handle, CLONE_NEWPID));
  close(handle);
}

// --- a namespace with some processes, threads, sessions and groups in it

static void *thread_inside(void *argument) {
  pid_t tid = syscall(SYS_gettid);
  pthread_mutex_t *mutex = argument; // of one owner, by his id
  if (mutex)
    MUST(!pthread_mutex_lock(mutex));
  arrive();
  wait_go();
  EQUAL(syscall(SYS_gettid), tid);
  if (mutex) {
    EQUAL(pthread_mutex_lock(mutex), EDEADLK);
    EQUAL(pthread_mutex_unlock(mutex), 0);
  }
  EQUAL(syscall(SYS_tgkill, getpid(), tid, 0), 0);
  return 0;
}

enum { PLAIN, LEADS_SESSION, LEADS_GROUP, ORPHAN = 4 };

static void leaf(long how) {
  pid_t pid = getpid(), parent = how & ORPHAN ? 1 : getppid();
  how &= ~ORPHAN;
  if (how == LEADS_SESSION)
    MUST(setsid() == pid);
  if (how == LEADS_GROUP)
    MUST(!setpgid(0, 0));
  pid_t session = getsid(0), group = getpgid(0);
  pthread_mutexattr_t kind;
  pthread_mutex_t mutex;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_ERRORCHECK);
  pthread_mutex_init(&mutex, &kind);
  pthread_t thread = spawn(thread_inside, &mutex);
  arrive();
  wait_go();
  EQUAL(getpid(), pid);
  EQUAL(getppid(), parent);
  EQUAL(getsid(0), session);
  EQUAL(getpgid(0), group);
  pthread_join(thread, 0);
}

static void nothing(long status) {
  _exit(status);
}

// Its child comes to process 1.
static void leaves_an_orphan(long unused) {
  (void)unused;
  child(leaf, ORPHAN);
  await_arrivals(2);
  _exit(0);
}

static void small_world(long with_outer_group) {
  EQUAL(getpid(), 1);
  EQUAL(getppid(), 0);
  pid_t session = getsid(0), group = getpgid(0);
  if (with_outer_group)
    EQUAL(group, 0);
  await(child(leaves_an_orphan, 0), 0);
  pid_t pids[3];
  for (long n = 0; n < 3; n++)
    pids[n] = child(leaf, n);
  pthread_t thread = spawn(thread_inside, 0);
  arrive();
  wait_go();
  EQUAL(getpid(), 1);
  EQUAL(getppid(), 0);
  EQUAL(getsid(0), session);
  EQUAL(getpgid(0), group);
  EQUAL(getsid(pids[1]), pids[1]);
  EQUAL(getpgid(pids[2]), pids[2]);
  EQUAL(getpgid(pids[0]), group);
  pthread_join(thread, 0);
  for (int n = 0; n < 3; n++)
    await(pids[n], 0);
  int status = -1;
  EQUAL(wait(&status) > 1, 1); // the orphan
  EQUAL(status, 0);
  EQUAL(wait(0), -1);
  pid_t another = child(nothing, 7);
  CHECK(another > 1);
  await(another, 7 << 8);
}

enum { IN_SMALL_WORLD = 10 };

static void inside(void) {
  open_board();
  pid_t pid = first(small_world, 0);
  await_arrivals(IN_SMALL_WORLD);
  cut();
  await(pid, 0);
  EQUAL(board->failures, 0);
}

static void leads_a_group(long unused) {
  (void)unused;
  MUST(!setpgid(0, 0));
  pid_t pid = first(small_world, 1), other = child(leaf, 0);
  wait_go();
  await(pid, 0);
  await(other, 0);
}

// Process 1 is in a process group that has no name where it is.
static void in_a_group_from_outside(void) {
  open_board();
  pid_t pid = child(leads_a_group, 0);
  await_arrivals(IN_SMALL_WORLD + 2);
  cut();
  await(pid, 0);
  EQUAL(board->failures, 0);
}

// --- namespaces within namespaces

static long deepest;

static void deeper(long depth) {
  if (depth)
    EQUAL(getpid(), 1);
  pid_t pid = depth == deepest ? -1 : syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0);
  if (!pid) {
    deeper(depth + 1);
    ends();
  }
  int last = pid < 0;
  pid_t beside = child(leaf, 0);
  if (last)
    board->ids[0] = depth;
  arrive();
  wait_go();
  if (depth) {
    EQUAL(getpid(), 1);
    EQUAL(getppid(), 0);
  }
  if (!last)
    await(pid, 0);
  else if (depth < deepest)
    EQUAL(syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0), -1);
  await(beside, 0);
}

static void within_each_other(void) {
  open_board();
  pid_t pid = child(deeper, 0);
  while (!__atomic_load_n(&board->ids[0], __ATOMIC_SEQ_CST) && !board->failures) {
    if (kill(pid, 0) || waitpid(pid, 0, WNOHANG))
      SKIP("not permitted to make namespaces");
    nap(0.001);
  }
  await_arrivals(3 * (board->ids[0] + 1));
  CHECK(board->ids[0] > 1);
  cut();
  await(pid, 0);
  EQUAL(board->failures, 0);
}

static void nested(void) {
  deepest = 4;
  within_each_other();
}

static void as_deep_as_can_be(void) {
  deepest = 100;
  within_each_other();
}

// --- where further children are to be

static void says_who_it_is(long unused) {
  (void)unused;
  _exit(getpid());
}

static void holds_the_place(long unused) {
  (void)unused;
  arrive();
  wait_go();
  EQUAL(getpid(), 1);
  await_arrivals(100);
}

static void begins_with_the_next_child(void) {
  open_board();
  enter_new(CLONE_NEWPID);
  cut();
  pid_t one = child(holds_the_place, 0);
  CHECK(one > 0);
  await(child(says_who_it_is, 0), 2 << 8);
  board->arrived = 100;
  await(one, 0);
}

static void goes_on_with_children_inside(void) {
  open_board();
  enter_new(CLONE_NEWPID);
  pid_t one = child(holds_the_place, 0), two = child(leaf, 0);
  await_arrivals(3);
  cut();
  await(two, 0);
  pid_t three = child(leaf, 2);
  await(three, 0);
  int status = 0;
  pid_t four = child(says_who_it_is, 0);
  EQUAL(waitpid(four, &status, 0), four);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) > 1);
  board->arrived = 100;
  await(one, 0);
}

// One child in a namespace, another in a second one, a third at home.
static void comes_and_goes(void) {
  open_board();
  pid_t one = first(holds_the_place, 0), two = first(holds_the_place, 0);
  enter_for_children(one);
  pid_t in_one = child(leaf, 2);
  enter_for_children(two);
  pid_t in_two = child(leaf, 1), also_in_two = child(leaf, 0);
  enter_for_children(getpid());
  pid_t home = child(leaf, 0);
  await_arrivals(10);
  cut();
  await(in_one, 0);
  await(in_two, 0);
  await(also_in_two, 0);
  await(home, 0);
  board->arrived = 100;
  await(one, 0);
  await(two, 0);
}

// --- those who have ended

static void keeps_the_dead(long unused) {
  (void)unused;
  pid_t pids[2] = {child(nothing, 3), child(says_who_it_is, 0)};
  pid_t killed = fork();
  MUST(killed >= 0);
  if (!killed)
    for (;;)
      pause();
  kill(killed, SIGTERM);
  siginfo_t info;
  for (int n = 0; n < 2; n++)
    MUST(!waitid(P_PID, pids[n], &info, WEXITED | WNOWAIT));
  MUST(!waitid(P_PID, killed, &info, WEXITED | WNOWAIT));
  arrive();
  wait_go();
  await(pids[0], 3 << 8);
  await(pids[1], pids[1] << 8);
  await(killed, SIGTERM);
}

static void ended(void) {
  open_board();
  pid_t pid = first(keeps_the_dead, 0), dead = first(nothing, 5), killed = first(holds_the_place, 0);
  await_arrivals(2);
  kill(killed, SIGKILL);
  siginfo_t info;
  MUST(!waitid(P_PID, dead, &info, WEXITED | WNOWAIT) && !waitid(P_PID, killed, &info, WEXITED | WNOWAIT));
  cut();
  await(dead, 5 << 8);
  await(killed, SIGKILL);
  await(pid, 0);
  EQUAL(board->failures, 0);
}

// A session, and a process group, go on without their leaders.
static void begins_a_session_and_ends(long unused) {
  (void)unused;
  MUST(setsid() == getpid());
  board->ids[1] = getpid();
  child(leaf, ORPHAN);
  child(leaf, ORPHAN | LEADS_GROUP);
  await_arrivals(4);
  _exit(0);
}

static void begins_a_group_and_ends(long unused) {
  (void)unused;
  MUST(!setpgid(0, 0));
  board->ids[2] = getpid();
  child(leaf, ORPHAN);
  await_arrivals(6);
  _exit(0);
}

static void without_leaders(long unused) {
  (void)unused;
  await(child(begins_a_session_and_ends, 0), 0);
  await(child(begins_a_group_and_ends, 0), 0);
  arrive();
  wait_go();
  int status;
  while (wait(&status) > 0)
    EQUAL(status, 0);
  EQUAL(kill(-board->ids[1], 0), -1);
  EQUAL(kill(-board->ids[2], 0), -1);
}

static void leaderless(void) {
  open_board();
  pid_t pid = first(without_leaders, 0);
  await_arrivals(7);
  cut();
  await(pid, 0);
  EQUAL(board->failures, 0);
}

// --- what is told by ids

static volatile sig_atomic_t asked, from;

static void on_signal(int number, siginfo_t *info, void *context) {
  (void)number, (void)context;
  asked++;
  from = info->si_pid;
}

static void sends_what_tells_its_id(long socket) {
  kill(getppid(), SIGUSR1); // blocked there
  MUST(write(socket, "me", 2) == 2);
  int file = open(path_of("locked"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  struct flock lock = {.l_type = F_WRLCK, .l_len = 10};
  MUST(file >= 0 && !fcntl(file, F_SETLK, &lock));
  arrive();
  wait_go();
  await_arrivals(50);
}

static pid_t owner_of(int fd, int *kind) {
  struct f_owner_ex owner = {0};
  MUST(!fcntl(fd, F_GETOWN_EX, &owner));
  *kind = owner.type;
  return owner.pid;
}

static void *has_a_timer(void *unused) {
  (void)unused;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGRTMIN);
  struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN};
  event._sigev_un._tid = syscall(SYS_gettid);
  timer_t timer, cpu;
  MUST(!timer_create(CLOCK_MONOTONIC, &event, &timer));
  clockid_t clock;
  MUST(!clock_getcpuclockid(getpid(), &clock) && !timer_create(clock, &event, &cpu));
  struct itimerspec soon = {.it_value = {.tv_nsec = 20000000}}, off = {0};
  arrive();
  wait_go();
  MUST(!timer_settime(timer, 0, &soon, 0));
  siginfo_t info;
  EQUAL(sigwaitinfo(&set, &info), SIGRTMIN);
  EQUAL(timer_settime(cpu, 0, &off, 0), 0);
  return 0;
}

static void told_by_ids(long unused) {
  (void)unused;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigaddset(&set, SIGRTMIN);
  sigprocmask(SIG_BLOCK, &set, 0);
  struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
  MUST(!sigaction(SIGUSR1, &action, 0) && !sigaction(SIGUSR2, &action, 0));
  int pair[2], ends_of_pipe[2], yes = 1, kind;
  MUST(!socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) && !pipe(ends_of_pipe));
  MUST(!setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes));
  pid_t pid = child(sends_what_tells_its_id, pair[1]);
  pthread_t thread = spawn(has_a_timer, 0);
  await_arrivals(2);
  int handle = syscall(SYS_pidfd_open, pid, 0);
  struct f_owner_ex to_child = {F_OWNER_PID, pid}, to_group = {F_OWNER_PGRP, 0};
  MUST(handle >= 0 && !fcntl(ends_of_pipe[0], F_SETOWN_EX, &to_child));
  MUST(!setpgid(pid, pid));
  to_group.pid = pid;
  MUST(!fcntl(ends_of_pipe[1], F_SETOWN_EX, &to_group));
  arrive();
  wait_go();
  pthread_join(thread, 0);
  EQUAL(owner_of(ends_of_pipe[0], &kind), pid);
  EQUAL(kind, F_OWNER_PID);
  EQUAL(owner_of(ends_of_pipe[1], &kind), pid);
  EQUAL(kind, F_OWNER_PGRP);
  char text[2], control[CMSG_SPACE(sizeof(struct ucred))];
  struct iovec vector = {text, 2};
  struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  EQUAL(recvmsg(pair[0], &message, 0), 2);
  struct ucred who = {0};
  if (CMSG_FIRSTHDR(&message))
    memcpy(&who, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof who);
  EQUAL(who.pid, pid);
  EQUAL(asked, 0);
  sigdelset(&set, SIGRTMIN);
  sigprocmask(SIG_UNBLOCK, &set, 0);
  EQUAL(asked, 1);
  EQUAL(from, pid);
  int file = open(path_of("locked"), O_RDWR | O_CLOEXEC);
  struct flock lock = {.l_type = F_WRLCK};
  EQUAL(fcntl(file, F_GETLK, &lock), 0);
  EQUAL(lock.l_pid, pid);
  EQUAL(syscall(SYS_pidfd_send_signal, handle, 0, 0, 0), 0);
  board->arrived = 50;
  await(pid, 0);
  EQUAL(syscall(SYS_pidfd_send_signal, handle, 0, 0, 0), -1);
}

static void ids(void) {
  open_board();
  pid_t pid = first(told_by_ids, 0);
  await_arrivals(3);
  cut();
  await(pid, 0);
  EQUAL(board->failures, 0);
}

// --- what must be refused

// Somebody is in it who is no descendant.
static void somebody_else_is_in_it(void) {
  open_board();
  pid_t one = first(holds_the_place, 0);
  pid_t between = fork();
  MUST(between >= 0);
  if (!between) {
    enter_for_children(one);
    if (!fork()) {
      arrive();
      wait_go();
      _exit(0);
    }
    _exit(0);
  }
  await(between, 0);
  await_arrivals(2);
  cut();
  board->arrived = 100;
  await(one, 0);
}

static void can_have_no_children(void) {
  enter_new(CLONE_NEWPID);
  await(child(nothing, 0), 0);
  cut();
  EQUAL(fork(), -1);
}

static void *goes_apart(void *unused) {
  (void)unused;
  enter_new(CLONE_NEWPID);
  arrive();
  wait_go();
  return 0;
}

static void thread_apart(void) {
  open_board();
  pthread_t thread = spawn(goes_apart, 0);
  await_arrivals(1);
  cut();
  pthread_join(thread, 0);
}

static void gets_a_handle(long handle) {
  arrive();
  wait_go();
  EQUAL(syscall(SYS_pidfd_send_signal, handle, 0, 0, 0), -1); // nor has it one for it
}

// A handle to a process that has no id where the handle is.
static void handle_to_outside(void) {
  open_board();
  int handle = syscall(SYS_pidfd_open, getpid(), 0);
  MUST(handle >= 0);
  pid_t pid = first(gets_a_handle, handle);
  close(handle);
  await_arrivals(1);
  cut();
  await(pid, 0);
  EQUAL(board->failures, 0);
}

SCENARIOS({"inside", inside}, {"in_a_group_from_outside", in_a_group_from_outside},
          {"nested", nested}, {"as_deep_as_can_be", as_deep_as_can_be}, {"begins_with_the_next_child", begins_with_the_next_child},
          {"goes_on_with_children_inside", goes_on_with_children_inside}, {"comes_and_goes", comes_and_goes},
          {"ended", ended}, {"leaderless", leaderless}, {"ids", ids},
          {"somebody_else_is_in_it", somebody_else_is_in_it}, {"can_have_no_children", can_have_no_children},
          {"thread_apart", thread_apart}, {"handle_to_outside", handle_to_outside})
