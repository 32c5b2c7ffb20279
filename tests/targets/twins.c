// Programs that go on beside their twins, which have other ids: each notes what it found in a line of its own.
#include "target.h"
#include <mqueue.h>
#include <netinet/in.h>
#include <semaphore.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif
#ifndef SIGEV_THREAD_ID
#define SIGEV_THREAD_ID 4
#endif

static void note(void) {
  char line[64];
  int length = snprintf(line, sizeof line, "%s %d\n", failures ? "bad" : "good", getpid());
  int file = open(path_of("results"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  MUST(file >= 0 && write(file, line, length) == length);
  close(file);
}

static pid_t id(void) {
  return syscall(SYS_gettid);
}

static pthread_mutex_t mutex(int type, int robust, int protocol) {
  pthread_mutex_t made;
  pthread_mutexattr_t how;
  MUST(pthread_mutexattr_init(&how) == 0 && pthread_mutexattr_settype(&how, type) == 0);
  if (robust)
    MUST(pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST) == 0);
  if (protocol)
    MUST((errno = pthread_mutexattr_setprotocol(&how, PTHREAD_PRIO_INHERIT)) == 0);
  MUST(pthread_mutex_init(&made, &how) == 0);
  return made;
}

static pthread_mutex_t normal = PTHREAD_MUTEX_INITIALIZER, recursive, checking;
static pthread_mutex_t robust, robust_recursive, robust_inherits, left_behind;
static pthread_mutex_t for_condition = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static pthread_rwlock_t shared = PTHREAD_RWLOCK_INITIALIZER;
static pthread_barrier_t barrier;
static sem_t counter;
static int is_on, woken, in_line;
static volatile int pinged_in[4];
static __thread int number;

static void on_ping(int signal) {
  (void)signal;
  pinged_in[number] = id();
}

// Waits in a mutex that the main thread holds.
static void *waits_for(void *argument) {
  number = 1;
  __atomic_add_fetch(&in_line, 1, __ATOMIC_SEQ_CST);
  EQUAL(pthread_mutex_lock(argument), 0);
  EQUAL(pthread_mutex_unlock(argument), 0);
  return argument;
}

// Ends with a lock that it has.
static void *leaves(void *unused) {
  number = 2;
  MUST(pthread_mutex_lock(&left_behind) == 0);
  __atomic_add_fetch(&in_line, 1, __ATOMIC_SEQ_CST);
  wait_go();
  return unused;
}

static void *sleeps(void *unused) {
  number = 3;
  sigset_t usr2;
  sigemptyset(&usr2);
  sigaddset(&usr2, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &usr2, 0);
  MUST(pthread_mutex_lock(&for_condition) == 0);
  __atomic_add_fetch(&in_line, 1, __ATOMIC_SEQ_CST);
  while (!is_on)
    EQUAL(pthread_cond_wait(&condition, &for_condition), 0);
  woken++;
  EQUAL(pthread_mutex_unlock(&for_condition), 0);
  sem_wait(&counter);
  pthread_barrier_wait(&barrier);
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, 0, &now);
  EQUAL(sigismember(&now, SIGUSR2), 1);
  return unused;
}

static void *fails_to_unlock(void *of) {
  EQUAL(pthread_mutex_unlock(of), EPERM);
  return 0;
}

static void *takes_all(void *unused) {
  pthread_mutex_t *all[] = {&normal, &recursive, &checking, &robust, &robust_recursive, &robust_inherits};
  for (size_t i = 0; i < COUNT(all); i++) {
    EQUAL(pthread_mutex_lock(all[i]), 0);
    EQUAL(pthread_mutex_unlock(all[i]), 0);
  }
  return unused;
}

static void locks(void) {
  int types[] = {PTHREAD_MUTEX_NORMAL, PTHREAD_MUTEX_RECURSIVE, PTHREAD_MUTEX_ERRORCHECK};
  recursive = mutex(types[1], 0, 0);
  checking = mutex(types[2], 0, 0);
  robust = mutex(types[0], 1, 0);
  robust_recursive = mutex(types[1], 1, 0);
  robust_inherits = mutex(types[0], 1, 1);
  left_behind = mutex(types[0], 1, 0);
  pthread_barrier_init(&barrier, 0, 2);
  sem_init(&counter, 0, 0);
  struct sigaction ping = {.sa_handler = on_ping, .sa_flags = SA_RESTART};
  sigaction(SIGUSR1, &ping, 0);
  // Each was locked and unlocked once, and remembers it if it does.
  MUST(pthread_mutex_lock(&recursive) == 0 && pthread_mutex_unlock(&recursive) == 0);
  MUST(pthread_mutex_lock(&checking) == 0 && pthread_mutex_unlock(&checking) == 0);
  pthread_mutex_t *held[] = {&robust, &robust_recursive, &robust_inherits, &normal};
  pthread_t waiting;
  for (size_t i = 0; i < COUNT(held); i++)
    MUST(pthread_mutex_lock(held[i]) == 0);
  MUST(pthread_mutex_lock(&robust_recursive) == 0);
  waiting = spawn(waits_for, &robust_inherits);
  pthread_t leaving = spawn(leaves, 0), sleeping = spawn(sleeps, 0);
  while (__atomic_load_n(&in_line, __ATOMIC_SEQ_CST) < 3)
    nap(0.001);
  nap(0.02);
  struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
  event.sigev_notify_thread_id = id();
  timer_t timer;
  MUST(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
  cut();

  EQUAL(kill(getpid(), 0), 0);
  // Signals reach the threads that they are for.
  EQUAL(pthread_kill(sleeping, SIGUSR1), 0);
  while (!pinged_in[3])
    nap(0.001);
  CHECK(pinged_in[3] != id() && pinged_in[3] != 0);
  EQUAL(raise(SIGUSR1), 0);
  EQUAL(pinged_in[0], id());
  EQUAL(pthread_kill(pthread_self(), SIGUSR1), 0);
  pinged_in[0] = 0;
  struct itimerspec soon = {.it_value = {0, 1000000}};
  EQUAL(timer_settime(timer, 0, &soon, 0), 0);
  while (!pinged_in[0])
    nap(0.001);
  EQUAL(pinged_in[0], id());
  // What was held is held, by this thread.
  EQUAL(pthread_mutex_trylock(&robust_recursive), 0);
  for (int i = 0; i < 3; i++)
    EQUAL(pthread_mutex_unlock(&robust_recursive), 0);
  CHECK(pthread_mutex_trylock(&robust) == EBUSY || pthread_mutex_trylock(&robust) == EDEADLK);
  EQUAL(pthread_mutex_unlock(&robust), 0);
  EQUAL(pthread_mutex_unlock(&robust_inherits), 0);
  EQUAL(pthread_mutex_unlock(&normal), 0);
  void *returned;
  EQUAL(pthread_join(waiting, &returned), 0);
  CHECK(returned == &robust_inherits);
  // One that ended with a lock is known to have done so.
  EQUAL(pthread_join(leaving, 0), 0);
  EQUAL(pthread_mutex_lock(&left_behind), EOWNERDEAD);
  EQUAL(pthread_mutex_consistent(&left_behind), 0);
  EQUAL(pthread_mutex_unlock(&left_behind), 0);
  // Those that know their owners know this one.
  for (int i = 0; i < 3; i++)
    EQUAL(pthread_mutex_lock(&recursive), 0);
  EQUAL(pthread_mutex_lock(&checking), 0);
  EQUAL(pthread_mutex_lock(&checking), EDEADLK);
  pthread_join(spawn(fails_to_unlock, &checking), 0);
  EQUAL(pthread_mutex_unlock(&checking), 0);
  for (int i = 0; i < 3; i++)
    EQUAL(pthread_mutex_unlock(&recursive), 0);
  EQUAL(pthread_mutex_unlock(&recursive), EPERM);
  pthread_join(spawn(takes_all, 0), 0);
  EQUAL(pthread_rwlock_wrlock(&shared), 0);
  CHECK(pthread_rwlock_tryrdlock(&shared) != 0);
  EQUAL(pthread_rwlock_unlock(&shared), 0);
  EQUAL(pthread_rwlock_rdlock(&shared), 0);
  EQUAL(pthread_rwlock_unlock(&shared), 0);
  pthread_mutex_lock(&for_condition);
  is_on = 1;
  pthread_cond_broadcast(&condition);
  pthread_mutex_unlock(&for_condition);
  sem_post(&counter);
  pthread_barrier_wait(&barrier);
  EQUAL(pthread_join(sleeping, 0), 0);
  EQUAL(woken, 1);
  clockid_t clock;
  struct timespec used;
  EQUAL(pthread_getcpuclockid(pthread_self(), &clock), 0);
  EQUAL(clock_gettime(clock, &used), 0);
  pid_t child = fork();
  if (child == 0) {
    pthread_join(spawn(takes_all, 0), 0);
    EQUAL(raise(SIGUSR1), 0);
    _exit(failures || pinged_in[0] != id());
  }
  int status = -1;
  EQUAL(waitpid(child, &status, 0), child);
  EQUAL(status, 0);
  note();
}

// A lock that knows its owner, held at the cut: its owner cannot be told anew with certainty.
static pthread_mutex_t *in_memory;

static void held(int type) {
  in_memory = malloc(sizeof *in_memory);
  *in_memory = mutex(type, 0, 0);
  MUST(pthread_mutex_lock(in_memory) == 0);
  cut();
  EQUAL(pthread_mutex_lock(in_memory), type == PTHREAD_MUTEX_RECURSIVE ? 0 : EDEADLK);
  if (type == PTHREAD_MUTEX_RECURSIVE)
    EQUAL(pthread_mutex_unlock(in_memory), 0);
  EQUAL(pthread_mutex_unlock(in_memory), 0);
  note();
}

static void held_recursive(void) {
  held(PTHREAD_MUTEX_RECURSIVE);
}

static void held_checking(void) {
  held(PTHREAD_MUTEX_ERRORCHECK);
}

static void held_for_writing(void) {
  MUST(pthread_rwlock_wrlock(&shared) == 0);
  cut();
  EQUAL(pthread_rwlock_unlock(&shared), 0);
  EQUAL(pthread_rwlock_wrlock(&shared), 0);
  note();
}

static void held_inherits(void) {
  normal = mutex(PTHREAD_MUTEX_NORMAL, 0, 1);
  MUST(pthread_mutex_lock(&normal) == 0);
  cut();
  EQUAL(pthread_mutex_unlock(&normal), 0);
  note();
}

// Somebody waits for a robust mutex, and has his id at hand.
static void *waits(void *unused) {
  __atomic_add_fetch(&in_line, 1, __ATOMIC_SEQ_CST);
  EQUAL(pthread_mutex_lock(&robust), 0);
  EQUAL(pthread_mutex_unlock(&robust), 0);
  return unused;
}

static void waited_for(void) {
  robust = mutex(PTHREAD_MUTEX_NORMAL, 1, 0);
  MUST(pthread_mutex_lock(&robust) == 0);
  pthread_t waiting = spawn(waits, 0);
  while (!__atomic_load_n(&in_line, __ATOMIC_SEQ_CST))
    nap(0.001);
  nap(0.02);
  cut();
  EQUAL(pthread_mutex_unlock(&robust), 0);
  EQUAL(pthread_join(waiting, 0), 0);
  note();
}

static void held_stream(void) {
  flockfile(stderr);
  cut();
  // Of one's own lock there may be more.
  flockfile(stderr);
  funlockfile(stderr);
  funlockfile(stderr);
  note();
}

// Holds it for a moment now and then.
static void held_at_times(void) {
  recursive = mutex(PTHREAD_MUTEX_RECURSIVE, 0, 0);
  ready();
  while (!gone()) {
    EQUAL(pthread_mutex_lock(&recursive), 0);
    EQUAL(pthread_mutex_lock(&recursive), 0);
    nap(0.001);
    EQUAL(pthread_mutex_unlock(&recursive), 0);
    EQUAL(pthread_mutex_unlock(&recursive), 0);
    nap(0.02);
  }
  note();
}

// What processes tell each other of themselves.
struct self {
  pid_t pid, parent, group, session;
};

static struct self self(void) {
  return (struct self){getpid(), getppid(), getpgrp(), getsid(0)};
}

static void tell(int to, struct self of) {
  MUST(write(to, &of, sizeof of) == sizeof of);
}

static struct self hear(int from) {
  struct self of = {0};
  EQUAL(read(from, &of, sizeof of), sizeof of);
  return of;
}

static pid_t its_pid;
static int its_status = -1;

static void *waits_for_child(void *child) {
  its_pid = waitpid((pid_t)(long)child, &its_status, 0);
  return 0;
}

// Processes with their groups, sessions and handles, of which each is asked for its ids after the cut.
static void tree(void) {
  enum { LEADER, MEMBER, SESSION, GRANDCHILD, ALL };
  int said[ALL][2], asked[ALL][2];
  for (int i = 0; i < ALL; i++)
    MUST(pipe2(said[i], O_CLOEXEC) == 0 && pipe2(asked[i], O_CLOEXEC) == 0);
  setpgid(0, 0);
  pid_t pids[ALL];
  for (int i = 0; i < GRANDCHILD; i++) {
    MUST((pids[i] = fork()) >= 0);
    if (pids[i] == 0) {
      char byte;
      if (i == LEADER)
        setpgid(0, 0);
      if (i == MEMBER)
        MUST(setpgid(0, pids[LEADER]) == 0);
      if (i == SESSION) {
        setsid();
        if (fork() == 0)
          i = GRANDCHILD;
      }
      write(said[i][1], "", 1);
      MUST(read(asked[i][0], &byte, 1) == 1);
      tell(said[i][1], self());
      MUST(read(asked[i][0], &byte, 1) == 1);
      _exit(i);
    }
    char byte;
    MUST(read(said[i][0], &byte, 1) == 1);
    if (i == SESSION)
      MUST(read(said[GRANDCHILD][0], &byte, 1) == 1);
  }
  pid_t ended = fork();
  if (ended == 0)
    _exit(7);
  siginfo_t info;
  MUST(waitid(P_PID, ended, &info, WEXITED | WNOWAIT) == 0);
  int handle = syscall(SYS_pidfd_open, pids[MEMBER], 0);
  int own = syscall(SYS_pidfd_open, getpid(), 0);
  int owned[2], talk[2], yes = 1, none;
  MUST(handle >= 0 && own >= 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, owned) == 0);
  MUST(fcntl(owned[0], F_SETOWN, pids[LEADER]) == 0 && fcntl(owned[1], F_SETOWN, -getpgrp()) == 0);
  MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, talk) == 0);
  MUST(setsockopt(talk[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes) == 0 && write(talk[1], "x", 1) == 1);
  sigset_t usr;
  sigemptyset(&usr);
  sigaddset(&usr, SIGUSR1);
  sigaddset(&usr, SIGUSR2);
  sigprocmask(SIG_BLOCK, &usr, 0);
  kill(getpid(), SIGUSR1);
  raise(SIGUSR2);
  int stat = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  MUST(prctl(PR_SET_PDEATHSIG, 0) == 0);
  pthread_t waiting = spawn(waits_for_child, (void *)(long)pids[LEADER]);
  nap(0.02);
  cut();

  struct self is[ALL], me = self();
  for (int i = 0; i < ALL; i++) {
    MUST(write(asked[i][1], "", 1) == 1);
    is[i] = hear(said[i][0]);
  }
  EQUAL(me.group, me.pid);
  EQUAL(is[LEADER].parent, me.pid);
  EQUAL(is[LEADER].group, is[LEADER].pid);
  EQUAL(is[MEMBER].parent, me.pid);
  EQUAL(is[MEMBER].group, is[LEADER].pid);
  EQUAL(is[MEMBER].session, me.session);
  EQUAL(is[SESSION].session, is[SESSION].pid);
  EQUAL(is[GRANDCHILD].parent, is[SESSION].pid);
  EQUAL(is[GRANDCHILD].session, is[SESSION].pid);
  EQUAL(is[GRANDCHILD].group, is[SESSION].pid);
  EQUAL(fcntl(owned[0], F_GETOWN), is[LEADER].pid);
  EQUAL(fcntl(owned[1], F_GETOWN), -me.group);
  char text[64] = "", *after;
  CHECK(read(stat, text, sizeof text - 1) > 0);
  EQUAL(strtol(text, &after, 10), me.pid);
  EQUAL(syscall(SYS_pidfd_send_signal, own, 0, 0, 0), 0);
  for (int signal = SIGUSR1; signal <= SIGUSR2; signal += SIGUSR2 - SIGUSR1) {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, signal);
    EQUAL(sigwaitinfo(&one, &info), signal);
    EQUAL(info.si_pid, me.pid);
  }
  union {
    char room[CMSG_SPACE(64)];
    struct cmsghdr align;
  } control;
  char byte;
  struct iovec part = {&byte, 1};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
  EQUAL(recvmsg(talk[0], &message, 0), 1);
  pid_t sender = 0;
  for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
    if (c->cmsg_type == 2) // SCM_CREDENTIALS
      memcpy(&sender, CMSG_DATA(c), sizeof sender);
  EQUAL(sender, me.pid);
  // Whoever waited for a child waits for the one that it is now.
  for (int i = 0; i < ALL; i++)
    MUST(write(asked[i][1], "", 1) == 1);
  pthread_join(waiting, 0);
  EQUAL(its_pid, is[LEADER].pid);
  EQUAL(its_status, LEADER << 8);
  EQUAL(waitid(3 /* P_PIDFD */, handle, &info, WEXITED), 0);
  EQUAL(info.si_pid, is[MEMBER].pid);
  EQUAL(info.si_status, MEMBER);
  int seen = 0;
  for (int left = 2; left; left--) {
    pid_t pid = wait(&none);
    CHECK(pid > 0);
    seen |= pid == is[SESSION].pid ? WEXITSTATUS(none) == SESSION : WEXITSTATUS(none) == 7 ? 2 : 4;
  }
  EQUAL(seen, 3);
  EQUAL(wait(&none), -1);
  note();
}

// Shared memory with a name, and a semaphore: the program's processes have it in common, and nobody else.
static void *counts(void *at) {
  // What is private, and what is shared, are of the same instant.
  static long private;
  volatile long *memory = at;
  while (!gone())
    for (int i = 0; i < 1000; i++) {
      EQUAL(memory[0], private);
      memory[0] = ++private;
    }
  return 0;
}

static void has_names(int in_a_tree) {
  enum { SIZE = 1 << 20 };
  char name[64];
  snprintf(name, sizeof name, "/stillpoint-twins-%d", getpid());
  int file = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  MUST(file >= 0 && ftruncate(file, SIZE) == 0);
  long *memory = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  sem_t *semaphore = sem_open(name, O_CREAT | O_EXCL, 0600, 0);
  MUST(memory != MAP_FAILED && semaphore != SEM_FAILED);
  // A page before the end was never touched.
  fill(memory + 1024, SIZE / 2, 5);
  int common = open(path_of("common"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  MUST(common >= 0 && ftruncate(common, 4096) == 0);
  MUST(mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, common, 0) != MAP_FAILED);
  close(common);
  pid_t child = in_a_tree ? fork() : 0;
  if (in_a_tree && child == 0) {
    wait_go();
    memory[1] += 10;
    sem_post(semaphore);
    _exit(0);
  }
  pthread_t counting = spawn(counts, memory);
  cut();

  EQUAL(pthread_join(counting, 0), 0);
  if (in_a_tree) {
    EQUAL(sem_wait(semaphore), 0);
    EQUAL(memory[1], 10);
    int status = -1;
    EQUAL(waitpid(-1, &status, 0) > 0, 1);
    EQUAL(status, 0);
  }
  CHECK(filled(memory + 1024, SIZE / 2, 5) && all_zero((char *)memory + SIZE / 4 * 3, SIZE / 4));
  // By its descriptor it is the same memory.
  memory[2]++;
  long read = 0;
  EQUAL(pread(file, &read, sizeof read, 2 * sizeof read), sizeof read);
  EQUAL(read, 1);
  int value = -1;
  EQUAL(sem_post(semaphore) || sem_getvalue(semaphore, &value), 0);
  EQUAL(value, 1);
  // Whoever comes first; the names are there once.
  shm_unlink(name);
  sem_unlink(name);
  note();
}

static void named(void) {
  has_names(0);
}

static void named_tree(void) {
  has_names(1);
}

// What a twin would take from the program.
static void only_once(void) {
  char name[64], data[16] = "";
  snprintf(name, sizeof name, "/stillpoint-twins-%d", getpid());
  MUST(mkfifo(path_of("fifo"), 0600) == 0);
  int fifo = open(path_of("fifo"), O_RDWR | O_NONBLOCK | O_CLOEXEC), yes = 1;
  MUST(fifo >= 0 && write(fifo, "unread", 6) == 6);
  mqd_t queue = mq_open(name, O_RDWR | O_CREAT | O_EXCL, 0600, 0);
  MUST(queue >= 0);
  int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  MUST(setsockopt(server, SOL_SOCKET, SO_REUSEPORT, &yes, sizeof yes) == 0 && listen(server, 5) == 0);
  int group = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct sockaddr_in any = {.sin_family = AF_INET};
  MUST(setsockopt(group, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0);
  MUST(bind(group, (struct sockaddr *)&any, sizeof any) == 0);
  cut();
  EQUAL(read(fifo, data, sizeof data), 6);
  EQUAL(memcmp(data, "unread", 6), 0);
  EQUAL(read(fifo, data, sizeof data), -1);
  mq_unlink(name);
  note();
}

SCENARIOS({"locks", locks}, {"tree", tree}, {"held_recursive", held_recursive}, {"held_checking", held_checking},
          {"held_for_writing", held_for_writing}, {"held_inherits", held_inherits}, {"held_stream", held_stream},
          {"waited_for", waited_for},
          {"held_at_times", held_at_times}, {"named", named}, {"named_tree", named_tree},
          {"only_once", only_once})
