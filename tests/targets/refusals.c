// Things that cannot be captured yet: each must be refused by name, and the program must go on unharmed.
// The second part holds things that may be refused or captured, but never got wrong.
#include "target.h"
#include <asm/ldt.h>
#include <linux/aio_abi.h>
#include <linux/netlink.h>
#include <linux/perf_event.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/fanotify.h>
#include <setjmp.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/sysmacros.h>
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/un.h>

static void connected(int s[2]) {
  int l = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof a;
  MUST(bind(l, (void *)&a, sizeof a) == 0 && listen(l, 1) == 0 && getsockname(l, (void *)&a, &length) == 0);
  MUST((s[0] = socket(AF_INET, SOCK_STREAM, 0)) >= 0 && connect(s[0], (void *)&a, length) == 0);
  MUST((s[1] = accept(l, 0, 0)) >= 0);
  close(l);
}

static void established_tcp(void) {
  int s[2];
  connected(s);
  cut();
  char c = 0;
  EQUAL(write(s[0], "z", 1), 1);
  EQUAL(read(s[1], &c, 1), 1);
  EQUAL(c, 'z');
}

static void pending_connection(void) {
  int l = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof a;
  MUST(bind(l, (void *)&a, sizeof a) == 0 && listen(l, 3) == 0 && getsockname(l, (void *)&a, &length) == 0);
  MUST(connect(c, (void *)&a, length) == 0);
  cut();
  CHECK(accept(l, 0, 0) >= 0);
}

static void connecting(void) { // to where there is no room for more, with data in the first packet
  enum { NO_COOKIE = 34 }; // TCP_FASTOPEN_NO_COOKIE
  int l = socket(AF_INET, SOCK_STREAM, 0), waiting = 0, on = 1;
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof a;
  MUST(bind(l, (void *)&a, sizeof a) == 0 && listen(l, 0) == 0 && getsockname(l, (void *)&a, &length) == 0);
  for (int i = 0; i < 8; i++) {
    int s = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (setsockopt(s, IPPROTO_TCP, NO_COOKIE, &on, sizeof on))
      SKIP("no TCP Fast Open here");
    MUST(sendto(s, "x", 1, MSG_FASTOPEN, (void *)&a, sizeof a) == 1 || errno == EINPROGRESS);
    nap(0.01);
    struct tcp_info info = {0};
    length = sizeof info;
    MUST(getsockopt(s, IPPROTO_TCP, TCP_INFO, &info, &length) == 0);
    waiting += info.tcpi_state == TCP_SYN_SENT;
  }
  if (!waiting)
    SKIP("there is always room");
  cut();
  CHECK(fcntl(l, F_GETFD) >= 0);
}

static void packet_ring(void) {
  int s = socket(AF_PACKET, SOCK_RAW, 0);
  struct { unsigned block_size, blocks, frame_size, frames; } ring = {4096, 1, 2048, 2};
  if (s < 0)
    SKIP("no right to packet sockets");
  MUST(setsockopt(s, 263, 5 /* PACKET_RX_RING */, &ring, sizeof ring) == 0);
  cut();
  CHECK(fcntl(s, F_GETFD) >= 0);
}

static void child_process(void) {
  pid_t child = fork();
  if (child == 0)
    for (;;)
      pause();
  cut();
  EQUAL(kill(child, SIGKILL), 0);
  EQUAL(waitpid(child, 0, 0), child);
}

static void dead_child(void) { // ended, and not yet waited for
  pid_t child = fork();
  if (child == 0)
    _exit(5);
  siginfo_t info;
  MUST(waitid(P_PID, child, &info, WEXITED | WNOWAIT) == 0);
  cut();
  int status = 0;
  EQUAL(waitpid(child, &status, 0), child);
  EQUAL(WEXITSTATUS(status), 5);
}

static void io_uring(void) {
  char parameters[120] = {0};
  int fd = syscall(425, 4, parameters);
  if (fd < 0)
    SKIP("no io_uring here");
  cut();
  EQUAL(syscall(426, fd, 0, 0, 0, 0, 0), 0);
}

// A process that is no child of ours and holds whatever we have open now. It does something before we go on; 0: it could not.
static pid_t orphan_that(int (*does)(int), int with) {
  int ends[2];
  MUST(pipe(ends) == 0);
  pid_t middle = fork();
  if (middle == 0) {
    if (fork())
      _exit(0);
    pid_t last = !does || does(with) ? getpid() : 0;
    if (write(ends[1], &last, sizeof last) != sizeof last)
      _exit(1);
    close(ends[0]);
    close(ends[1]);
    while (last && access(directory, F_OK) == 0 && !gone())
      nap(0.01);
    _exit(0);
  }
  pid_t last = 0;
  MUST(waitpid(middle, 0, 0) == middle && read(ends[0], &last, sizeof last) == sizeof last);
  close(ends[0]);
  close(ends[1]);
  return last;
}

static pid_t orphan(void) {
  return orphan_that(0, 0);
}

static int new_terminal(const char *multiplexer, char slave[64]) {
  int master = open(multiplexer, O_RDWR | O_NOCTTY | O_CLOEXEC), unlock = 0, number;
  if (master < 0 || ioctl(master, TIOCSPTLCK, &unlock) || ioctl(master, TIOCGPTN, &number))
    return -1;
  snprintf(slave, 64, "/dev/pts/%d", number);
  return master;
}

static int has_own_mounts(void) {
  return !unshare(CLONE_NEWNS) && !mount(0, "/", 0, MS_REC | MS_PRIVATE, 0);
}

// Has the slave open, and calls it otherwise.
static int calls_it_console(int master) {
  int number;
  char slave[64];
  if (!has_own_mounts() || ioctl(master, TIOCGPTN, &number))
    return 0;
  snprintf(slave, sizeof slave, "/dev/pts/%d", number);
  close(open(path_of("console"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  close(master);
  return !mount(slave, path_of("console"), 0, MS_BIND, 0) && open(path_of("console"), O_RDWR | O_NOCTTY) >= 0;
}

static void foreign_terminal(void) {
  char slave[64], c;
  int master = new_terminal("/dev/ptmx", slave);
  MUST(master >= 0);
  if (!orphan_that(calls_it_console, master))
    SKIP("not permitted to have mounts of its own");
  int ours = open(slave, O_RDWR | O_NOCTTY);
  cut();
  EQUAL(write(master, "x\n", 2), 2);
  EQUAL(read(ours, &c, 1), 1);
}

// Has a slave of the same number in another devpts open.
static int has_its_like(int master) {
  char wanted[64], slave[64] = "";
  int number;
  if (!has_own_mounts() || ioctl(master, TIOCGPTN, &number) || mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666"))
    return 0;
  close(master);
  snprintf(wanted, sizeof wanted, "/dev/pts/%d", number);
  while (strcmp(slave, wanted))
    if (new_terminal("/dev/pts/ptmx", slave) < 0)
      return 0;
  return open(wanted, O_RDWR | O_NOCTTY) >= 0;
}

static void terminal_elsewhere(void) {
  char slave[64], c;
  int master = new_terminal("/dev/ptmx", slave);
  MUST(master >= 0);
  if (!orphan_that(has_its_like, master))
    SKIP("not permitted to have a devpts of its own");
  int ours = open(slave, O_RDWR | O_NOCTTY);
  cut();
  EQUAL(write(master, "x\n", 2), 2);
  EQUAL(read(ours, &c, 1), 1);
}

static void foreign_pipe(void) {
  int ends[2];
  char c;
  MUST(pipe(ends) == 0);
  orphan();
  cut();
  EQUAL(write(ends[1], "x", 1), 1);
  EQUAL(read(ends[0], &c, 1), 1);
}

// What a program sees of a pipe whose other end is outside is told in a file: that differs once it has been restored.
static void tell_seen(const char *what) {
  FILE *f = fopen(path_of("seen"), "w");
  MUST(f && fputs(what, f) >= 0 && fclose(f) == 0);
}

static void outside_reader(void) {
  int ends[2];
  MUST(pipe(ends) == 0);
  signal(SIGPIPE, SIG_IGN);
  orphan();
  close(ends[0]);
  EQUAL(write(ends[1], "gone", 4), 4);
  cut();
  ssize_t n = write(ends[1], "x", 1);
  tell_seen(n == 1 ? "written" : errno == EPIPE ? "EPIPE" : "another error");
}

static void outside_writer(void) {
  int ends[2];
  char data[8];
  MUST(pipe2(ends, O_NONBLOCK) == 0);
  orphan();
  close(ends[1]);
  cut();
  ssize_t n = read(ends[0], data, 4);
  tell_seen(n == 0 ? "end" : n < 0 && errno == EAGAIN ? "nothing yet" : "another error");
}

static void foreign_socket(void) {
  int ends[2];
  char c;
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  orphan();
  close(ends[0]); // the other side has it alone
  cut();
  CHECK(recv(ends[1], &c, 1, MSG_DONTWAIT) <= 0); // nothing, or the end of the other side
}

static void foreign_memory(void) {
  char *p = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  p[0] = 3;
  orphan();
  cut();
  EQUAL(p[0], 3);
}

// A process outside that has the same descriptors, or the same current directory.
static void shared_outside(int flags) {
  pid_t middle = syscall(SYS_clone, SIGCHLD | flags, 0, 0, 0, 0);
  if (!middle) {
    if (!syscall(SYS_clone, SIGCHLD | flags, 0, 0, 0, 0))
      while (access(directory, F_OK) == 0 && !gone())
        nap(0.01);
    _exit(0);
  }
  MUST(waitpid(middle, 0, 0) == middle);
  cut();
  CHECK(access(directory, F_OK) == 0);
}

static void foreign_table(void) {
  shared_outside(CLONE_FILES);
}

static void foreign_directory(void) {
  shared_outside(CLONE_FS);
}

static void foreign_segment(void) {
  int id = shmget(IPC_PRIVATE, 4 * PAGE, IPC_CREAT | 0600);
  if (id < 0)
    SKIP("no System V shared memory here");
  char *p = shmat(id, 0, 0);
  shmctl(id, IPC_RMID, 0);
  p[0] = 7;
  orphan();
  cut();
  EQUAL(p[0], 7);
}

static void foreign_memfd(void) {
  int fd = syscall(SYS_memfd_create, "both", 1);
  MUST(fd >= 0 && ftruncate(fd, PAGE) == 0);
  orphan();
  cut();
  EQUAL(ftruncate(fd, 2 * PAGE), 0);
}

static void foreign_pidfd(void) {
  pid_t other = orphan();
  int fd = syscall(SYS_pidfd_open, other, 0);
  MUST(fd >= 0);
  cut();
  CHECK(fcntl(fd, F_GETFD) >= 0);
}

static void userfaultfd(void) {
  int fd = syscall(SYS_userfaultfd, O_CLOEXEC);
  uint64_t api[3] = {0xaa, 0, 0};
  if (fd < 0)
    SKIP("no userfaultfd here");
  MUST(ioctl(fd, 0xc018aa3f, api) == 0);
  char *p = map_anon(4 * PAGE);
  uint64_t range[4] = {(uint64_t)(uintptr_t)p, 4 * PAGE, 1, 0};
  MUST(ioctl(fd, 0xc020aa00, range) == 0);
  cut();
  CHECK(fcntl(fd, F_GETFD) >= 0);
}

static void netlink(void) {
  int s = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
  MUST(s >= 0);
  cut();
  CHECK(fcntl(s, F_GETFD) >= 0);
}

static void perf_event(void) {
  struct perf_event_attr a = {.type = PERF_TYPE_SOFTWARE, .size = sizeof a, .config = PERF_COUNT_SW_CPU_CLOCK};
  int fd = syscall(SYS_perf_event_open, &a, 0, -1, -1, 0);
  if (fd < 0)
    SKIP("no perf events here");
  cut();
  uint64_t n = 0;
  EQUAL(read(fd, &n, 8), 8);
}

static void *allows(void *group) {
  for (;;) {
    struct fanotify_event_metadata event;
    if (read(*(int *)group, &event, sizeof event) != sizeof event)
      return 0;
    struct fanotify_response answer = {event.fd, FAN_ALLOW};
    if (event.mask & FAN_OPEN_PERM)
      MUST(write(*(int *)group, &answer, sizeof answer) == sizeof answer);
    close(event.fd);
  }
}

// Who opens a file without a name, as a checkpoint would, asks this program.
static void asked_for_permission(void) {
  static int group;
  group = fanotify_init(FAN_CLASS_CONTENT | FAN_CLOEXEC, O_RDONLY);
  if (group < 0)
    SKIP("no fanotify here");
  int fd = open(path_of("asked"), O_RDWR | O_CREAT, 0600);
  MUST(fd >= 0 && write(fd, "data", 4) == 4);
  if (fanotify_mark(group, FAN_MARK_ADD, FAN_OPEN_PERM, AT_FDCWD, path_of("asked")))
    SKIP("this kernel asks nobody");
  MUST(!unlink(path_of("asked")));
  pthread_t thread;
  MUST(!pthread_create(&thread, 0, allows, &group));
  char again[64], text[4];
  snprintf(again, sizeof again, "/proc/self/fd/%d", fd);
  cut();
  int opened = open(again, O_RDONLY);
  CHECK(opened >= 0 && read(opened, text, 4) == 4 && !memcmp(text, "data", 4));
}

// Nobody asks it before DIRECTORY/ask is there.
static void asked_later(void) {
  int group = -1;
  close(open(path_of("asked"), O_RDWR | O_CREAT, 0600));
  ready();
  while (access(path_of("ask"), F_OK) && access(go_path, F_OK))
    nap(0.001);
  if (!access(path_of("ask"), F_OK)) {
    group = fanotify_init(FAN_CLASS_CONTENT | FAN_CLOEXEC, O_RDONLY);
    if (group >= 0 && fanotify_mark(group, FAN_MARK_ADD, FAN_OPEN_PERM, AT_FDCWD, path_of("asked")))
      group = -1;
    close(open(path_of(group < 0 ? "cannot" : "asks"), O_RDWR | O_CREAT, 0600));
  }
  wait_go();
  CHECK(group < 0 || fcntl(group, F_GETFD) == FD_CLOEXEC);
}

static void unread_fanotify(void) {
  int fd = fanotify_init(FAN_CLASS_NOTIF | FAN_NONBLOCK, O_RDONLY);
  if (fd < 0)
    SKIP("no fanotify here");
  mkdir(path_of("told"), 0700);
  MUST(!fanotify_mark(fd, FAN_MARK_ADD, FAN_CLOSE_WRITE | FAN_EVENT_ON_CHILD, AT_FDCWD, path_of("told")));
  close(open(path_of("told/noticed"), O_CREAT | O_WRONLY, 0600));
  cut();
  struct fanotify_event_metadata event;
  EQUAL(read(fd, &event, sizeof event), sizeof event);
  EQUAL(event.mask, FAN_CLOSE_WRITE);
}

static void fanotify_of_mounts(void) {
  int fd = fanotify_init(0x4000, 0); // FAN_REPORT_MNT
  int here = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
  if (fd < 0 || fanotify_mark(fd, FAN_MARK_ADD | 0x110, 0x3000000, here, 0)) // FAN_MARK_MNTNS, FAN_MNT_ATTACH, FAN_MNT_DETACH
    SKIP("this kernel does not tell of mounts");
  close(here);
  cut();
  CHECK(fcntl(fd, F_GETFD) >= 0);
}

static void bpf(void) {
  struct {
    uint32_t type, key, value, entries;
    char rest[104];
  } a = {2, 4, 8, 4, {0}};
  int fd = syscall(SYS_bpf, 0, &a, sizeof a);
  if (fd < 0)
    SKIP("no BPF here");
  cut();
  CHECK(fcntl(fd, F_GETFD) >= 0);
}

// --- refused or right

static void aio(void) {
  aio_context_t context = 0;
  if (syscall(SYS_io_setup, 8, &context))
    SKIP("no asynchronous I/O here");
  int fd = open(path_of("aio"), O_RDWR | O_CREAT, 0600);
  MUST(write(fd, "0123456789", 10) == 10);
  cut();
  char c[4] = {0};
  struct iocb io = {.aio_lio_opcode = IOCB_CMD_PREAD, .aio_fildes = fd, .aio_buf = (uintptr_t)c, .aio_nbytes = 3,
                    .aio_offset = 4};
  struct iocb *list[1] = {&io};
  struct io_event event;
  struct timespec patience = {2, 0};
  EQUAL(syscall(SYS_io_submit, context, 1, list), 1);
  EQUAL(syscall(SYS_io_getevents, context, 1, 1, &event, &patience), 1);
  CHECK(!strcmp(c, "456"));
}

static void message_queue(void) {
  struct {
    long flags, maximum, size, count, rest[4];
  } a = {0, 4, 64, 0, {0}};
  char name[64];
  snprintf(name, sizeof name, "stillpoint-%d", getpid());
  int q = syscall(SYS_mq_open, name, O_RDWR | O_CREAT, 0600, &a);
  if (q < 0)
    SKIP("no message queues here");
  MUST(syscall(SYS_mq_timedsend, q, "message", 7, 3, 0) == 0);
  cut();
  char c[64];
  unsigned priority = 0;
  EQUAL(syscall(SYS_mq_timedreceive, q, c, 64, &priority, 0), 7);
  EQUAL(priority, 3);
  syscall(SYS_mq_unlink, name);
}

static void told_queue(void) { // to be told of its next message
  char name[64];
  snprintf(name, sizeof name, "/stillpoint-told-%d", getpid());
  struct mq_attr a = {.mq_maxmsg = 4, .mq_msgsize = 64};
  mqd_t q = mq_open(name, O_RDWR | O_CREAT, 0600, &a);
  if (q < 0)
    SKIP("no message queues here");
  struct sigevent told = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGWINCH, .sigev_value.sival_int = 5};
  MUST(mq_unlink(name) == 0 && mq_notify(q, &told) == 0);
  cut();
  EQUAL(mq_notify(q, 0), 0);
}

static void full_queue(void) { // a message that only exists in it
  char name[64], text[64];
  snprintf(name, sizeof name, "/stillpoint-full-%d", getpid());
  struct mq_attr a = {.mq_maxmsg = 4, .mq_msgsize = 64};
  mqd_t q = mq_open(name, O_RDWR | O_CREAT, 0600, &a);
  if (q < 0)
    SKIP("no message queues here");
  MUST(mq_unlink(name) == 0 && mq_send(q, "message", 8, 2) == 0);
  cut();
  unsigned priority = 0;
  EQUAL(mq_receive(q, text, sizeof text, &priority), 8);
  EQUAL(priority, 2);
}

static void semaphore_undo(void) { // an operation that the kernel undoes when the program ends
  int id = semget(IPC_PRIVATE, 1, IPC_CREAT | 0600);
  if (id < 0)
    SKIP("no System V semaphores here");
  struct sembuf take = {.sem_op = -1, .sem_flg = SEM_UNDO}, give = {.sem_op = 1, .sem_flg = SEM_UNDO};
  MUST(semctl(id, 0, SETVAL, 1) == 0 && semop(id, &take, 1) == 0);
  cut();
  EQUAL(semctl(id, 0, GETVAL), 0);
  EQUAL(semop(id, &give, 1), 0);
  EQUAL(semctl(id, 0, IPC_RMID), 0);
}

static void out_of_band(void) {
  int s[2];
  char c = 0;
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0 && send(s[0], "ab", 2, 0) == 2);
  if (send(s[0], "!", 1, MSG_OOB) != 1)
    SKIP("no out-of-band data on unix sockets here");
  cut();
  EQUAL(recv(s[1], &c, 1, MSG_OOB), 1);
  EQUAL(c, '!');
}

static void sent_ahead(void) { // on a connection that was not yet accepted
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  int length = 2 + 1 + snprintf(a.sun_path + 1, 100, "stillpoint-ahead-%d", getpid());
  int l = socket(AF_UNIX, SOCK_STREAM, 0), c = socket(AF_UNIX, SOCK_STREAM, 0);
  MUST(bind(l, (void *)&a, length) == 0 && listen(l, 3) == 0 && connect(c, (void *)&a, length) == 0);
  MUST(write(c, "ahead", 5) == 5);
  cut();
  char text[8] = {0};
  EQUAL(read(accept(l, 0, 0), text, 8), 5);
}

static void epoll_in_flight(void) {
  int s[2], e = epoll_create1(0);
  MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, s) == 0);
  char control[CMSG_SPACE(sizeof(int))] = {0}, byte = 'f';
  struct iovec v = {&byte, 1};
  struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  struct cmsghdr *c = CMSG_FIRSTHDR(&m);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(c), &e, sizeof e);
  MUST(sendmsg(s[0], &m, 0) == 1);
  close(e);
  cut();
  EQUAL(recvmsg(s[1], &m, 0), 1);
}

static volatile int there, stop;

static void *own_table(void *unused) {
  MUST(unshare(CLONE_FILES) == 0);
  int fd = open("/dev/null", O_RDONLY);
  MUST(dup2(fd, 77) == 77);
  there = 1;
  while (!stop)
    nap(0.002);
  CHECK(fcntl(77, F_GETFD) >= 0);
  return unused;
}

static void own_descriptor_table(void) {
  pthread_t t = spawn(own_table, 0);
  while (!there)
    nap(0.001);
  cut();
  EQUAL(fcntl(77, F_GETFD), -1);
  stop = 1;
  pthread_join(t, 0);
}

static void *own_place(void *unused) {
  MUST(unshare(CLONE_FS) == 0);
  MUST(chdir("/usr") == 0);
  there = 1;
  while (!stop)
    nap(0.002);
  char here[100];
  CHECK(getcwd(here, sizeof here) && !strcmp(here, "/usr"));
  return unused;
}

static void own_directory(void) {
  MUST(chdir("/tmp") == 0);
  pthread_t t = spawn(own_place, 0);
  while (!there)
    nap(0.001);
  cut();
  char here[100];
  CHECK(getcwd(here, sizeof here) && !strcmp(here, "/tmp"));
  stop = 1;
  pthread_join(t, 0);
}

static void in_flight(void) { // a descriptor that exists only in a message
  int s[2], fd = open(path_of("flying"), O_RDWR | O_CREAT, 0600);
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0 && write(fd, "flying", 6) == 6);
  char control[CMSG_SPACE(sizeof(int))] = {0}, byte = 'f';
  struct iovec v = {&byte, 1};
  struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  struct cmsghdr *c = CMSG_FIRSTHDR(&m);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(c), &fd, sizeof fd);
  MUST(sendmsg(s[0], &m, 0) == 1);
  close(fd);
  cut();
  memset(control, 0, sizeof control);
  EQUAL(recvmsg(s[1], &m, 0), 1);
  c = CMSG_FIRSTHDR(&m);
  CHECK(c && c->cmsg_type == SCM_RIGHTS);
  if (c) {
    memcpy(&fd, CMSG_DATA(c), sizeof fd);
    char text[8] = {0};
    EQUAL(pread(fd, text, 6, 0), 6);
    CHECK(!strcmp(text, "flying"));
  }
}

static void lease(void) {
  int fd = open(path_of("leased"), O_RDONLY | O_CREAT, 0600);
  MUST(fd >= 0);
  if (fcntl(fd, F_SETLEASE, F_RDLCK))
    SKIP("no leases here");
  cut();
  EQUAL(fcntl(fd, F_GETLEASE), F_RDLCK);
}

static void broken_lease(void) { // somebody waits to open the file
  int fd = open(path_of("leased"), O_RDONLY | O_CREAT, 0600);
  signal(SIGIO, SIG_IGN);
  if (fd < 0 || fcntl(fd, F_SETLEASE, F_RDLCK))
    SKIP("no leases here");
  CHECK(open(path_of("leased"), O_WRONLY | O_NONBLOCK) < 0 && errno == EWOULDBLOCK);
  cut();
  CHECK(fcntl(fd, F_GETFD) >= 0);
}

static void directory_notes(void) {
  int fd = open(directory, O_RDONLY);
  signal(SIGIO, SIG_IGN);
  if (fd < 0 || fcntl(fd, F_NOTIFY, DN_DELETE | DN_MULTISHOT))
    SKIP("no dnotify here");
  cut();
  CHECK(fcntl(fd, F_GETFD) >= 0);
}

static void unread_inotify(void) {
  int fd = inotify_init1(IN_NONBLOCK);
  MUST(inotify_add_watch(fd, directory, IN_CREATE) > 0);
  close(open(path_of("noticed"), O_CREAT | O_WRONLY, 0600));
  cut();
  char buffer[4096];
  CHECK(read(fd, buffer, sizeof buffer) > 0);
  CHECK(!strcmp(((struct inotify_event *)buffer)->name, "noticed"));
}

// What is watched for being looked at, and could be saved by a look at it only.
static void watched_and(const char *what) {
  mkdir(path_of("watched"), 0700);
  int file = open(path_of("watched/file"), O_RDWR | O_CREAT, 0600), notes = inotify_init1(IN_NONBLOCK);
  MUST(file >= 0 && ftruncate(file, 4096) == 0);
  if (!strcmp(what, "mapped"))
    MUST(mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) != MAP_FAILED);
  if (!strcmp(what, "only written")) {
    close(file);
    file = open(path_of("watched/file"), O_WRONLY);
    MUST(file >= 0 && !unlink(path_of("watched/file")));
  }
  MUST(inotify_add_watch(notes, path_of("watched"), IN_ALL_EVENTS) > 0);
  cut();
  char event[4096];
  EQUAL(read(notes, event, sizeof event), -1);
  EQUAL(errno, EAGAIN);
  EQUAL(close(file), 0);
}

static void watched_mapping(void) { watched_and("mapped"); }
static void watched_and_gone(void) { watched_and("only written"); }

static void bound_udp(void) {
  int s = socket(AF_INET, SOCK_DGRAM, 0);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, b;
  socklen_t length = sizeof a;
  MUST(bind(s, (void *)&a, sizeof a) == 0 && getsockname(s, (void *)&a, &length) == 0);
  cut();
  EQUAL(getsockname(s, (void *)&b, &length), 0);
  CHECK(!memcmp(&a, &b, sizeof a));
  char c = 0;
  EQUAL(sendto(s, "u", 1, 0, (void *)&a, sizeof a), 1);
  EQUAL(recv(s, &c, 1, 0), 1);
}

static void connected_udp(void) {
  int a = socket(AF_INET, SOCK_DGRAM, 0);
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(9)};
  MUST(connect(a, (void *)&to, sizeof to) == 0);
  struct sockaddr_in local, seen;
  socklen_t length = sizeof local;
  MUST(getsockname(a, (void *)&local, &length) == 0);
  cut();
  EQUAL(getpeername(a, (void *)&seen, &length), 0);
  EQUAL(seen.sin_port, to.sin_port);
  EQUAL(getsockname(a, (void *)&seen, &length), 0);
  EQUAL(seen.sin_port, local.sin_port);
}

static void unbound_tcp(void) {
  int s = socket(AF_INET, SOCK_STREAM, 0);
  MUST(s >= 0);
  cut();
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  EQUAL(bind(s, (void *)&a, sizeof a), 0);
  EQUAL(listen(s, 1), 0);
}

static void no_room(void) { // all of the address space is taken, down to pieces of 64 KiB
  for (size_t piece = 1ul << 46; piece >= 1 << 16; piece /= 2)
    while (mmap(0, piece, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED) {
    }
  cut();
}

static void signed_tcp(void) { // packets without a signature are not for it
  struct {
    struct sockaddr_storage to;
    uint8_t flags, prefix;
    uint16_t length;
    int interface;
    uint8_t key[80];
  } sign = {.length = 3, .key = "key"};
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  memcpy(&sign.to, &to, sizeof to);
  int s = socket(AF_INET, SOCK_STREAM, 0);
  MUST(s >= 0);
  if (setsockopt(s, IPPROTO_TCP, 14 /* TCP_MD5SIG */, &sign, sizeof sign))
    SKIP("this kernel does not sign packets");
  MUST(listen(s, 3) == 0);
  cut();
}

static sigjmp_buf without_it;

static void no_such_calls(int signal) {
  siglongjmp(without_it, signal);
}

static void own_segment(void) { // as programs have that run 32-bit code, and by a call of such
  struct user_desc *entry = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
  MUST(entry != MAP_FAILED);
  *entry = (struct user_desc){.entry_number = -1, .base_addr = (unsigned)(uintptr_t)entry, .limit = 0xfffff, .seg_32bit = 1,
                              .limit_in_pages = 1, .useable = 1};
  long done;
  signal(SIGSEGV, no_such_calls);
  if (sigsetjmp(without_it, 1))
    SKIP("no calls of 32-bit programs here");
  __asm__ volatile("int $0x80" : "=a"(done) : "a"(243), "b"(entry) : "memory", "r8", "r9", "r10", "r11");
  if (done)
    SKIP("set_thread_area: %s", strerror((int)-done));
  signal(SIGSEGV, SIG_DFL);
  __asm__ volatile("mov %0, %%gs" : : "r"(entry->entry_number * 8 + 3));
  cut();
  unsigned first;
  __asm__ volatile("movl %%gs:0, %0" : "=r"(first));
  EQUAL(first, entry->entry_number);
}

static void router_alert(void) { // packets of one kind for routers: which it is can be set, and not be read
  enum { ALERT = 22, RSVP = 1 };
  int s = socket(AF_INET6, SOCK_RAW, IPPROTO_RAW), kind = RSVP, is = 0;
  socklen_t length = sizeof is;
  if (s < 0 || setsockopt(s, IPPROTO_IPV6, ALERT, &kind, sizeof kind))
    SKIP("no right to raw sockets, or no IPv6");
  cut();
  EQUAL(getsockopt(s, IPPROTO_IPV6, ALERT, &is, &length), 0);
  EQUAL(is, 1);
}

static void tells_of_pressure(const char *path) {
  static const char trigger[] = "some 500000 2000000";
  int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 || write(fd, trigger, sizeof trigger) != sizeof trigger)
    SKIP("nobody is told of pressure here");
  cut();
  EQUAL(write(fd, trigger, sizeof trigger), -1);
  EQUAL(errno, EBUSY); // it has one
}

static void pressure_trigger(void) {
  tells_of_pressure("/proc/pressure/cpu");
}

static void pressure_of_a_group(void) {
  const char *where[] = {"/sys/fs/cgroup/cpu.pressure", "/sys/fs/cgroup/unified/cpu.pressure"};
  tells_of_pressure(where[access(where[0], F_OK) != 0]);
}

// A terminal that is no terminal any more, but a line of something else.
static void line_discipline(void) {
  static const int others[] = {27 /* N_NULL */, 13, 1, 3, 15, 25};
  int unlock = 0, number, is = 0, master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
  MUST(master >= 0 && !ioctl(master, TIOCSPTLCK, &unlock) && !ioctl(master, TIOCGPTN, &number));
  char name[64];
  snprintf(name, sizeof name, "/dev/pts/%d", number);
  int slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC), set = -1;
  MUST(slave >= 0);
  for (size_t i = 0; i < COUNT(others) && set < 0; i++)
    if (!ioctl(slave, TIOCSETD, &others[i]))
      set = others[i];
  if (set < 0)
    SKIP("no other line discipline here");
  cut();
  EQUAL(ioctl(slave, TIOCGETD, &is), 0);
  EQUAL(is, set);
}

// A datagram of which the first half was sent, with more to come.
static void half_sent(int receiver, int sender, const void *to, socklen_t length) {
  char back[64] = {0};
  MUST(sendto(sender, "half", 4, MSG_MORE, to, length) == 4);
  cut();
  EQUAL(sendto(sender, "rest", 4, 0, to, length), 4);
  EQUAL(recv(receiver, back, sizeof back, 0), 8);
  CHECK(!memcmp(back, "halfrest", 8));
}

static void half_a_datagram(void) {
  int receiver = socket(AF_INET, SOCK_DGRAM, 0), sender = socket(AF_INET, SOCK_DGRAM, 0);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof a;
  MUST(bind(receiver, (void *)&a, length) == 0 && getsockname(receiver, (void *)&a, &length) == 0);
  MUST(connect(sender, (void *)&a, length) == 0);
  half_sent(receiver, sender, 0, 0);
}

static void half_a_datagram6(void) {
  int receiver = socket(AF_INET6, SOCK_DGRAM, 0), sender = socket(AF_INET6, SOCK_DGRAM, 0);
  struct sockaddr_in6 a = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
  socklen_t length = sizeof a;
  if (receiver < 0 || bind(receiver, (void *)&a, length))
    SKIP("no IPv6 here");
  MUST(getsockname(receiver, (void *)&a, &length) == 0);
  half_sent(receiver, sender, &a, length);
}

static const char *own_terminal(void) {
  int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  MUST(master >= 0 && !unlockpt(master) && ptsname(master));
  return ptsname(master);
}

static void terminal_by_path(void) {
  int slave = open(own_terminal(), O_PATH | O_CLOEXEC);
  MUST(slave >= 0);
  cut();
  struct stat s;
  CHECK(!fstat(slave, &s) && S_ISCHR(s.st_mode));
}

static void watched_terminal(void) {
  int fd = inotify_init1(IN_NONBLOCK);
  MUST(inotify_add_watch(fd, own_terminal(), IN_ATTRIB) > 0);
  cut();
}

static void local_descriptors(void) {
  struct user_desc entry = {.base_addr = 0x12345000, .limit = 0xfffff, .seg_32bit = 1, .limit_in_pages = 1, .useable = 1};
  char before[8] = {0}, after[8] = {0};
  if (syscall(SYS_modify_ldt, 1, &entry, sizeof entry))
    SKIP("modify_ldt: %s", strerror(errno));
  MUST(syscall(SYS_modify_ldt, 0, before, sizeof before) == sizeof before);
  cut();
  EQUAL(syscall(SYS_modify_ldt, 0, after, sizeof after), sizeof after);
  CHECK(!memcmp(before, after, sizeof after));
}

enum { THREAD_KEYRING = -1, PROCESS_KEYRING = -2, READ_KEY = 11 };

static long new_key(long keyring) {
  return syscall(SYS_add_key, "user", "stillpoint", "x", 1, keyring);
}

static void is_there(long key) {
  char byte = 0;
  EQUAL(syscall(SYS_keyctl, READ_KEY, key, &byte, 1), 1);
  EQUAL(byte, 'x');
}

static void process_keyring(void) {
  long key = new_key(PROCESS_KEYRING);
  if (key < 0)
    SKIP("add_key: %s", strerror(errno));
  cut();
  is_there(key);
}

static struct { // what another thread than the main one has
  int (*take)(void);
  void (*keep)(void);
  volatile int stage;
} other;

static void *has_it(void *unused) {
  (void)unused;
  other.stage = other.take() ? -1 : 1;
  while (other.stage != 2)
    usleep(1000);
  other.keep();
  return 0;
}

static void of_another_thread(int (*take)(void), void (*keep)(void)) {
  pthread_t thread;
  other.take = take, other.keep = keep;
  MUST(!pthread_create(&thread, 0, has_it, 0));
  while (!other.stage)
    usleep(1000);
  if (other.stage < 0)
    SKIP("this kernel has none");
  cut();
  other.stage = 2;
  MUST(!pthread_join(thread, 0));
}

static long threads_key;

static int has_a_key(void) {
  threads_key = new_key(THREAD_KEYRING);
  MUST(threads_key >= 0 || errno == ENOSYS);
  return threads_key < 0;
}

static void its_key_is_there(void) {
  is_there(threads_key);
}

static void thread_keyring(void) {
  of_another_thread(has_a_key, its_key_is_there);
}

static int in_a_domain(void) { // in which block devices may not be made
  enum { MAKE_BLOCK = 1 << 11 };
  uint64_t handled = MAKE_BLOCK;
  int rules = (int)syscall(444 /* landlock_create_ruleset */, &handled, sizeof handled, 0);
  if (rules < 0)
    return -1;
  MUST(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
  MUST(!syscall(446 /* landlock_restrict_self */, rules, 0));
  close(rules);
  return 0;
}

static void forbidden_block_device(void) {
  unlink(path_of("block"));
  EQUAL(mknod(path_of("block"), S_IFBLK | 0600, makedev(7, 0)), -1);
}

static void landlock(void) {
  if (in_a_domain())
    SKIP("landlock_create_ruleset: %s", strerror(errno));
  cut();
  forbidden_block_device();
}

static void landlock_of_a_thread(void) {
  of_another_thread(in_a_domain, forbidden_block_device);
}

static void two_names(void) { // lead to one socket
  int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "one"}, other = {.sun_family = AF_UNIX, .sun_path = "two"};
  MUST(!bind(listener, (void *)&name, sizeof name) && !listen(listener, 2) && !link("one", "two"));
  cut();
  for (int i = 0; i < 2; i++)
    EQUAL(connect(socket(AF_UNIX, SOCK_STREAM, 0), (void *)(i ? &other : &name), sizeof name), 0);
}

static void sealed_memory(void) { // mseal(2): may not be unmapped, also not by whoever restores
  char *p = map_anon(4 * PAGE);
  fill(p, 4 * PAGE, 4);
  if (syscall(462, p, 4 * PAGE, 0))
    SKIP("this kernel has no mseal");
  cut();
  CHECK(filled(p, 4 * PAGE, 4));
  EQUAL(munmap(p, 4 * PAGE), -1);
}

static void droppable_memory(void) { // the kernel may drop it: contents are the same, or zeros
  char *p = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, 0x08 /* MAP_DROPPABLE */ | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    SKIP("this kernel has no droppable memory");
  p[0] = 9;
  cut();
  CHECK(p[0] == 9 || p[0] == 0);
}

static void own_mounts(void) {
  if (unshare(CLONE_NEWNS))
    SKIP("not permitted to unshare mounts");
  cut();
  CHECK(access("/", F_OK) == 0);
}

static void own_host_name(void) {
  if (unshare(0x04000000 /* CLONE_NEWUTS */) || sethostname("stillpoint-test", 15))
    SKIP("not permitted to unshare the host name");
  cut();
  char name[64] = {0};
  gethostname(name, 63);
  CHECK(!strcmp(name, "stillpoint-test"));
}

// One end of a FIFO; the other one is for others to open.
static void fifo_reader(void) {
  MUST(mkfifo(path_of("fifo"), 0600) == 0);
  int end = open(path_of("fifo"), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  MUST(end >= 0);
  cut();
  char data[8];
  CHECK(read(end, data, sizeof data) <= 0);
}

// The name is that of a descriptor of its own.
static void bound_through_proc(void) {
  int folder = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC), fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  MUST(folder >= 0 && fd >= 0);
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  snprintf(a.sun_path, sizeof a.sun_path, "/proc/self/fd/%d/socket", folder);
  MUST(bind(fd, (void *)&a, sizeof a) == 0 && listen(fd, 5) == 0);
  cut();
  CHECK(access(path_of("socket"), F_OK) == 0);
}

SCENARIOS({"fifo_reader", fifo_reader}, {"bound_through_proc", bound_through_proc}, {"established_tcp", established_tcp}, {"connecting", connecting}, {"packet_ring", packet_ring}, {"pending_connection", pending_connection},
          {"child_process", child_process}, {"dead_child", dead_child}, {"io_uring", io_uring},
          {"foreign_table", foreign_table},
          {"foreign_directory", foreign_directory}, {"foreign_segment", foreign_segment}, {"foreign_pipe", foreign_pipe}, {"outside_reader", outside_reader}, {"outside_writer", outside_writer}, {"foreign_socket", foreign_socket},
          {"foreign_terminal", foreign_terminal}, {"terminal_elsewhere", terminal_elsewhere},
          {"foreign_memory", foreign_memory}, {"foreign_memfd", foreign_memfd}, {"foreign_pidfd", foreign_pidfd},
          {"userfaultfd", userfaultfd}, {"connected_udp", connected_udp}, {"netlink", netlink},
          {"perf_event", perf_event}, {"asked_for_permission", asked_for_permission}, {"asked_later", asked_later}, {"unread_fanotify", unread_fanotify},
          {"fanotify_of_mounts", fanotify_of_mounts}, {"bpf", bpf}, {"aio", aio},
          {"message_queue", message_queue}, {"own_descriptor_table", own_descriptor_table},
          {"own_directory", own_directory}, {"in_flight", in_flight}, {"lease", lease},
          {"broken_lease", broken_lease}, {"directory_notes", directory_notes},
          {"unread_inotify", unread_inotify}, {"watched_mapping", watched_mapping}, {"watched_and_gone", watched_and_gone}, {"bound_udp", bound_udp}, {"unbound_tcp", unbound_tcp},
          {"no_room", no_room}, {"sealed_memory", sealed_memory}, {"local_descriptors", local_descriptors}, {"own_segment", own_segment}, {"terminal_by_path", terminal_by_path}, {"watched_terminal", watched_terminal}, {"process_keyring", process_keyring}, {"thread_keyring", thread_keyring}, {"landlock", landlock}, {"landlock_of_a_thread", landlock_of_a_thread}, {"two_names", two_names}, {"signed_tcp", signed_tcp}, {"half_a_datagram", half_a_datagram}, {"half_a_datagram6", half_a_datagram6}, {"router_alert", router_alert}, {"pressure_trigger", pressure_trigger}, {"pressure_of_a_group", pressure_of_a_group}, {"line_discipline", line_discipline}, {"droppable_memory", droppable_memory}, {"own_mounts", own_mounts},
          {"own_host_name", own_host_name}, {"told_queue", told_queue}, {"full_queue", full_queue},
          {"semaphore_undo", semaphore_undo}, {"out_of_band", out_of_band}, {"sent_ahead", sent_ahead}, {"epoll_in_flight", epoll_in_flight})
