// Processes of a tree in namespaces that they made: which of them share one, and what is in it.
#include "family.h"
#include <arpa/inet.h>
#include <linux/fib_rules.h>
#include <linux/rtnetlink.h>
#include <linux/sockios.h>
#include <mqueue.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/utsname.h>

// Identity of a namespace of a process.
static ino_t space(pid_t pid, const char *kind) {
  char path[64];
  struct stat s;
  snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, kind);
  if (stat(path, &s))
    return 0;
  return s.st_ino;
}

// --- names of the machine

static void named(const char *host, const char *domain) {
  struct utsname names;
  MUST(!uname(&names));
  CHECK(!strcmp(names.nodename, host));
  CHECK(!strcmp(names.domainname, domain));
}

static void name(const char *host, const char *domain) {
  MUST(!sethostname(host, strlen(host)) && !setdomainname(domain, strlen(domain)));
}

static void *wait_in_thread(void *unused) {
  (void)unused;
  arrive();
  wait_go();
  named("alone", "of-its-own");
  return 0;
}

static void host_name(void) {
  open_board();
  enter_new(CLONE_NEWUTS);
  name("alone", "of-its-own");
  pthread_t thread = spawn(wait_in_thread, 0);
  await_arrivals(1);
  cut();
  named("alone", "of-its-own");
  pthread_join(thread, 0);
}

static void host_names_child(long n) {
  if (n == 1) {
    enter_new(CLONE_NEWUTS);
    name("second", "");
  }
  if (n == 2) {
    enter_new(CLONE_NEWUTS);
    char longest[65] = {0};
    memset(longest, 'x', 64);
    name(longest, "third");
  }
  pid_t inner = n < 3 ? child(host_names_child, 3 + n) : 0;
  arrive();
  wait_go();
  char longest[65] = {0};
  memset(longest, 'x', 64);
  named(n % 3 == 0 ? "first" : n % 3 == 1 ? "second" : longest, n % 3 == 0 ? "domain" : n % 3 == 1 ? "" : "third");
  if (inner) {
    EQUAL(space(inner, "uts"), space(getpid(), "uts"));
    CHECK(space(getppid(), "uts") != space(getpid(), "uts") || n == 0);
  }
  arrive();
  await_arrivals(13); // nobody ends before all have looked
  if (inner)
    await_ok(inner);
}

static void host_names(void) {
  open_board();
  enter_new(CLONE_NEWUTS);
  name("first", "domain");
  pid_t pids[3];
  for (long n = 0; n < 3; n++)
    pids[n] = child(host_names_child, n);
  await_arrivals(6);
  cut();
  named("first", "domain");
  EQUAL(space(pids[0], "uts"), space(getpid(), "uts"));
  CHECK(space(pids[1], "uts") != space(pids[2], "uts"));
  arrive();
  for (int n = 0; n < 3; n++)
    await_ok(pids[n]);
  name("changed", "later");
  named("changed", "later");
}

// The root is where it was, a descendant is not.
static void host_name_below_child(long unused) {
  (void)unused;
  enter_new(CLONE_NEWUTS);
  name("below", "it");
  arrive();
  wait_go();
  named("below", "it");
}

static void host_name_below(void) {
  struct utsname before, after;
  open_board();
  MUST(!uname(&before));
  pid_t pid = child(host_name_below_child, 0);
  await_arrivals(1);
  cut();
  MUST(!uname(&after));
  CHECK(!strcmp(before.nodename, after.nodename));
  await_ok(pid);
}

// --- interprocess communication

static void write_setting(const char *name, const char *value) {
  char path[100];
  snprintf(path, sizeof path, "/proc/sys/%s", name);
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  MUST(fd >= 0 && write(fd, value, strlen(value)) == (ssize_t)strlen(value));
  close(fd);
}

static long setting(const char *name) {
  char path[100];
  snprintf(path, sizeof path, "/proc/sys/%s", name);
  char *text = contents(path, 0);
  long value = atol(text);
  free(text);
  return value;
}

struct message {
  long type;
  char text[64];
};

static void send_message(int queue, long type, const char *text) {
  struct message m = {.type = type};
  strcpy(m.text, text);
  MUST(!msgsnd(queue, &m, strlen(text), IPC_NOWAIT));
}

static void receives(int queue, long type, const char *text) {
  struct message m = {0};
  EQUAL(msgrcv(queue, &m, sizeof m.text, 0, IPC_NOWAIT), strlen(text));
  EQUAL(m.type, type);
  CHECK(!memcmp(m.text, text, strlen(text)));
}

// Objects that nobody holds but the namespace.
static void ipc_objects(void) {
  enter_new(CLONE_NEWIPC);
  // One that is removed makes the others' ids large, and leaves a hole.
  int hole = semget(IPC_PRIVATE, 1, IPC_CREAT | 0600);
  int set = semget(0x5151, 3, IPC_CREAT | 0640);
  int plain = semget(IPC_PRIVATE, 1, IPC_CREAT | 0600);
  MUST(hole >= 0 && set >= 0 && plain >= 0);
  unsigned short values[3] = {7, 0, 32767};
  MUST(!semctl(set, 0, SETALL, values) && !semctl(hole, 0, IPC_RMID));
  hole = semget(IPC_PRIVATE, 1, IPC_CREAT | 0600);
  MUST(hole >= 0 && !semctl(hole, 0, IPC_RMID));
  int full = msgget(0x6161, IPC_CREAT | 0604), empty = msgget(IPC_PRIVATE, IPC_CREAT | 0600);
  MUST(full >= 0 && empty >= 0);
  send_message(full, 3, "first");
  send_message(full, 1, "");
  send_message(full, 1l << 40, "the third message");
  struct msqid_ds limits;
  MUST(!msgctl(full, IPC_STAT, &limits));
  limits.msg_qbytes = 10;
  limits.msg_perm.uid = 12;
  limits.msg_perm.gid = 13;
  MUST(!msgctl(full, IPC_SET, &limits));
  int unattached = shmget(0x7171, 3 * PAGE + 17, IPC_CREAT | 0660);
  MUST(unattached >= 0);
  char *memory = shmat(unattached, 0, 0);
  MUST(memory != (void *)-1);
  fill(memory, 3 * PAGE + 16, 5);
  MUST(!shmdt(memory));
  int attached = shmget(IPC_PRIVATE, 2 * PAGE, IPC_CREAT | 0600);
  MUST(attached >= 0);
  char *at = shmat(attached, 0, 0), *twice = shmat(attached, 0, SHM_RDONLY);
  MUST(at != (void *)-1 && twice != (void *)-1);
  int marked = shmget(IPC_PRIVATE, PAGE, IPC_CREAT | 0600);
  char *nameless = shmat(marked, 0, 0);
  MUST(marked >= 0 && nameless != (void *)-1 && !shmctl(marked, IPC_RMID, 0));
  fill(at, 2 * PAGE, 6);
  fill(nameless, PAGE, 7);
  write_setting("kernel/msgmax", "7000");
  write_setting("kernel/shmmax", "12000"); // less than there is
  write_setting("kernel/sem", "100\t3200\t50\t12");
  cut();
  EQUAL(semget(0x5151, 0, 0), set);
  unsigned short found[3] = {0};
  EQUAL(semctl(set, 0, GETALL, found), 0);
  CHECK(!memcmp(values, found, sizeof values));
  EQUAL(semctl(plain, 0, GETVAL), 0);
  struct semid_ds of_set;
  EQUAL(semctl(set, 0, IPC_STAT, &of_set), 0);
  EQUAL(of_set.sem_perm.mode & 0777, 0640);
  EQUAL(of_set.sem_nsems, 3);
  EQUAL(msgget(0x6161, 0), full);
  EQUAL(msgctl(full, IPC_STAT, &limits), 0);
  EQUAL(limits.msg_qbytes, 10);
  EQUAL(limits.msg_qnum, 3);
  EQUAL(limits.msg_perm.uid, 12);
  EQUAL(limits.msg_perm.gid, 13);
  EQUAL(limits.msg_perm.mode & 0777, 0604);
  receives(full, 3, "first");
  receives(full, 1, "");
  receives(full, 1l << 40, "the third message");
  EQUAL(msgctl(empty, IPC_STAT, &limits), 0);
  EQUAL(limits.msg_qnum, 0);
  EQUAL(shmget(0x7171, 0, 0), unattached);
  memory = shmat(unattached, 0, 0);
  MUST(memory != (void *)-1);
  CHECK(filled(memory, 3 * PAGE + 16, 5));
  CHECK(filled(at, 2 * PAGE, 6) && filled(twice, 2 * PAGE, 6) && filled(nameless, PAGE, 7));
  at[5]++;
  EQUAL(twice[5], at[5]);
  struct shmid_ds segment;
  EQUAL(shmctl(attached, IPC_STAT, &segment), 0);
  EQUAL(segment.shm_nattch, 2);
  EQUAL(shmctl(unattached, IPC_STAT, &segment), 0);
  EQUAL(segment.shm_perm.mode & 0777, 0660);
  EQUAL(segment.shm_segsz, 3 * PAGE + 17);
  EQUAL(setting("kernel/msgmax"), 7000);
  EQUAL(setting("kernel/shmmax"), 12000);
  EQUAL(setting("kernel/sem"), 100);
  EQUAL(shmget(IPC_PRIVATE, 13000, IPC_CREAT | 0600), -1);
}

static mqd_t posix_queue(const char *name, int flags) {
  struct mq_attr attributes = {.mq_maxmsg = 3, .mq_msgsize = 40};
  return mq_open(name, flags, 0640, &attributes);
}

static void posix_queues(void) {
  enter_new(CLONE_NEWIPC);
  mqd_t open = posix_queue("/open", O_RDWR | O_CREAT | O_EXCL), again = posix_queue("/open", O_WRONLY | O_NONBLOCK);
  mqd_t nameless = posix_queue("/nameless", O_RDWR | O_CREAT | O_EXCL);
  mqd_t closed = posix_queue("/closed", O_RDWR | O_CREAT | O_EXCL);
  if (open < 0)
    SKIP("no message queues here");
  MUST(again >= 0 && nameless >= 0 && closed >= 0 && !mq_unlink("/nameless") && !mq_close(closed));
  cut();
  struct mq_attr attributes;
  closed = mq_open("/closed", O_RDWR);
  CHECK(closed >= 0);
  EQUAL(mq_getattr(closed, &attributes), 0);
  EQUAL(attributes.mq_maxmsg, 3);
  EQUAL(attributes.mq_msgsize, 40);
  EQUAL(mq_getattr(again, &attributes), 0);
  EQUAL(attributes.mq_flags, O_NONBLOCK);
  CHECK(mq_open("/nameless", O_RDWR) < 0);
  char text[40];
  EQUAL(mq_send(again, "through", 8, 1), 0);
  EQUAL(mq_receive(open, text, sizeof text, 0), 8);
  EQUAL(mq_send(nameless, "too", 4, 1), 0);
  EQUAL(mq_receive(nameless, text, sizeof text, 0), 4);
}

static int shared_id;
static char *inherited;

// The same ids in every namespace, other memory.
static void ipc_child(long n) {
  if (n) {
    MUST(!shmdt(inherited)); // it is not of the new namespace
    enter_new(CLONE_NEWIPC);
  }
  int id = shmget(0x1234, PAGE, IPC_CREAT | 0600);
  int set = semget(0x1234, 1, IPC_CREAT | 0600);
  MUST(id >= 0 && set >= 0);
  char *memory = shmat(id, 0, 0);
  MUST(memory != (void *)-1);
  if (n)
    fill(memory, PAGE, n);
  arrive();
  wait_go();
  CHECK(filled(memory, PAGE, n ? n : 100));
  EQUAL(shmget(0x1234, 0, 0), id);
  EQUAL(semget(0x1234, 0, 0), set);
  if (!n) {
    EQUAL(id, shared_id);
    struct sembuf give = {.sem_op = 1};
    EQUAL(semop(set, &give, 1), 0); // somebody waits
  }
}

static void ipc_apart(void) {
  open_board();
  enter_new(CLONE_NEWIPC);
  shared_id = shmget(0x1234, PAGE, IPC_CREAT | 0600);
  int set = semget(0x1234, 1, IPC_CREAT | 0600);
  MUST(shared_id >= 0 && set >= 0);
  char *memory = inherited = shmat(shared_id, 0, 0);
  MUST(memory != (void *)-1);
  fill(memory, PAGE, 100);
  pid_t pids[3];
  for (long n = 0; n < 3; n++)
    pids[n] = child(ipc_child, n);
  await_arrivals(3);
  ready();
  struct sembuf take = {.sem_op = -1};
  while (semop(set, &take, 1))
    EQUAL(errno, EINTR);
  CHECK(filled(memory, PAGE, 100));
  for (int n = 0; n < 3; n++)
    await_ok(pids[n]);
}

// --- clocks

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

static int home = -1, offsets = -1;

// A child whose clocks are ahead of its parent's.
static pid_t child_ahead(void (*run)(long), long seconds) {
  home = open("/proc/self/ns/time", O_RDONLY | O_CLOEXEC);
  if (home < 0)
    SKIP("no time namespaces here");
  enter_new(CLONE_NEWTIME);
  int fd = offsets = open("/proc/self/timens_offsets", O_RDWR | O_CLOEXEC);
  MUST(fd >= 0);
  // What is there is relative to the machine's clocks, as is what is written.
  char text[200] = {0}, *at = text;
  long monotonic = 0, boottime = 0;
  MUST(read(fd, text, sizeof text - 1) > 0);
  for (; at && *at; at = strchr(at, '\n'), at = at ? at + 1 : 0)
    if (sscanf(at, "monotonic %ld", &monotonic) != 1)
      sscanf(at, "boottime %ld", &boottime);
  int length = snprintf(text, sizeof text, "monotonic %ld 0\nboottime %ld 0\n", monotonic + seconds, boottime + 2 * seconds);
  MUST(!lseek(fd, 0, SEEK_SET) && write(fd, text, length) == length);
  pid_t pid = child(run, seconds);
  MUST(!setns(home, CLONE_NEWTIME));
  close(fd);
  close(home);
  home = offsets = -1;
  return pid;
}

static struct times {
  double monotonic, boottime;
} *times;

static void tell_times(int n) {
  times[n].monotonic = seconds(CLOCK_MONOTONIC);
  times[n].boottime = seconds(CLOCK_BOOTTIME);
}

static void clock_child(long ahead) {
  if (home >= 0)
    MUST(!close(home) && !close(offsets));
  double before = now();
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
  struct itimerspec far = {.it_value = {1000}};
  MUST(timer >= 0 && !timerfd_settime(timer, 0, &far, 0));
  arrive();
  wait_go();
  CHECK(now() >= before && now() < before + 500);
  EQUAL(timerfd_gettime(timer, &far), 0);
  CHECK(far.it_value.tv_sec > 500 && far.it_value.tv_sec <= 1000);
  tell_times(ahead ? ahead / 10000 : 3);
  arrive();
  await_arrivals(8);
}

static void clocks(void) {
  open_board();
  times = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  MUST(times != MAP_FAILED);
  pid_t pids[3] = {child_ahead(clock_child, 10000), child_ahead(clock_child, 20000), child(clock_child, 0)};
  await_arrivals(3);
  cut();
  await_arrivals(6);
  tell_times(0);
  // The children told the time before, and not long before.
  for (int n = 1; n <= 3; n++) {
    double ahead = n < 3 ? n * 10000 : 0;
    double monotonic = times[n].monotonic - times[0].monotonic, boottime = times[n].boottime - times[0].boottime;
    CHECK(monotonic <= ahead && monotonic > ahead - 500);
    CHECK(boottime <= 2 * ahead && boottime > 2 * ahead - 500);
  }
  CHECK(space(pids[0], "time") != space(pids[1], "time"));
  EQUAL(space(pids[2], "time"), space(getpid(), "time"));
  __atomic_add_fetch(&board->arrived, 2, __ATOMIC_SEQ_CST);
  for (int n = 0; n < 3; n++)
    await_ok(pids[n]);
}

// --- control groups

static int at_the_root(void) {
  char *text = contents("/proc/self/cgroup", 0);
  int at = 1;
  for (char *line = strtok(text, "\n"); line; line = strtok(0, "\n"))
    at &= strlen(line) > 2 && !strcmp(line + strlen(line) - 2, ":/");
  free(text);
  return at;
}

static void control_group_child(long unused) {
  (void)unused;
  arrive();
  wait_go();
  CHECK(at_the_root());
  EQUAL(space(getpid(), "cgroup"), space(getppid(), "cgroup"));
}

static void control_groups(void) {
  open_board();
  enter_new(0x02000000 /* CLONE_NEWCGROUP */);
  MUST(at_the_root());
  pid_t pid = child(control_group_child, 0);
  await_arrivals(1);
  cut();
  CHECK(at_the_root());
  await_ok(pid);
}

// --- networks

static int loopback(int up) {
  struct ifreq request = {.ifr_name = "lo"};
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  MUST(s >= 0 && !ioctl(s, SIOCGIFFLAGS, &request));
  if (up) {
    request.ifr_flags |= IFF_UP;
    MUST(!ioctl(s, SIOCSIFFLAGS, &request));
  }
  close(s);
  return request.ifr_flags & IFF_UP;
}

static int can_connect(void) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof a;
  int s = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM, 0);
  MUST(s >= 0 && c >= 0);
  int can = !bind(s, (void *)&a, sizeof a) && !listen(s, 1) && !getsockname(s, (void *)&a, &length) &&
            !connect(c, (void *)&a, sizeof a);
  close(s);
  close(c);
  return can;
}

static void network_child(long up) {
  enter_new(CLONE_NEWNET);
  MUST(!loopback(0));
  if (up)
    loopback(1);
  arrive();
  wait_go();
  EQUAL(!!loopback(0), up);
  EQUAL(can_connect(), up);
  char *devices = contents("/proc/net/dev", 0);
  CHECK(strstr(devices, "lo:"));
  free(devices);
}

static void networks(void) {
  open_board();
  pid_t pids[2] = {child(network_child, 0), child(network_child, 1)};
  await_arrivals(2);
  cut();
  for (int n = 0; n < 2; n++)
    await_ok(pids[n]);
}

// Connections of all kinds between processes in a network of their own.
static void network_server(long unused) {
  (void)unused;
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(80), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  int door = socket(AF_INET, SOCK_STREAM, 0);
  MUST(door >= 0 && !bind(door, (void *)&a, sizeof a) && !listen(door, 5));
  arrive();
  int c = accept(door, 0, 0);
  MUST(c >= 0 && write(c, "greeting", 8) == 8);
  arrive();
  wait_go();
  char text[8];
  EQUAL(read(c, text, 8), 8);
  CHECK(!memcmp(text, "question", 8));
  EQUAL(write(c, "answered", 8), 8);
  EQUAL(close(accept(door, 0, 0)), 0);
}

static void network_sockets(void) {
  open_board();
  enter_new(CLONE_NEWNET);
  loopback(1);
  int pair[2], abstract = socket(AF_UNIX, SOCK_STREAM, 0), datagrams = socket(AF_INET, SOCK_DGRAM, 0);
  struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "\0in a network of its own"};
  struct sockaddr_in udp = {.sin_family = AF_INET, .sin_port = htons(53), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  MUST(abstract >= 0 && datagrams >= 0 && !socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
  MUST(!bind(abstract, (void *)&name, sizeof name) && !listen(abstract, 3));
  MUST(!bind(datagrams, (void *)&udp, sizeof udp));
  pid_t pid = child(network_server, 0);
  await_arrivals(1);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(80), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  int s = socket(AF_INET, SOCK_STREAM, 0);
  MUST(s >= 0 && !connect(s, (void *)&a, sizeof a));
  await_arrivals(2);
  MUST(write(pair[0], "packet", 6) == 6);
  cut();
  char text[8];
  EQUAL(read(s, text, 8), 8);
  CHECK(!memcmp(text, "greeting", 8));
  EQUAL(write(s, "question", 8), 8);
  EQUAL(read(s, text, 8), 8);
  CHECK(!memcmp(text, "answered", 8));
  EQUAL(read(pair[1], text, 8), 6);
  int c = socket(AF_INET, SOCK_STREAM, 0), u = socket(AF_UNIX, SOCK_STREAM, 0);
  EQUAL(connect(c, (void *)&a, sizeof a), 0);
  EQUAL(connect(u, (void *)&name, sizeof name), 0);
  EQUAL(sendto(c = socket(AF_INET, SOCK_DGRAM, 0), "to you", 6, 0, (void *)&udp, sizeof udp), 6);
  EQUAL(recv(datagrams, text, 8, MSG_DONTWAIT), 6);
  await_ok(pid);
}

// A socket stays in the namespace that it was made in.
static void network_of_sockets(void) {
  int pair[2];
  MUST(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
  enter_new(CLONE_NEWNET);
  MUST(write(pair[0], "before", 6) == 6);
  cut();
  char text[6];
  EQUAL(read(pair[1], text, 6), 6);
  CHECK(!memcmp(text, "before", 6));
}

static const struct {
  const char *name, *value;
} network_wishes[] = {
    {"net/ipv4/ip_local_port_range", "100\t200\n"},
    {"net/ipv4/ping_group_range", "0\t2147483647\n"},
    {"net/ipv4/ip_forward", "1\n"}, // changes others
    {"net/ipv4/conf/lo/rp_filter", "2\n"},
    {"net/ipv6/conf/all/disable_ipv6", "1\n"},
    {"net/ipv6/conf/lo/disable_ipv6", "0\n"}, // but not here
    {"net/core/somaxconn", "77\n"},
    {"net/ipv4/tcp_fastopen_key", "00000001-00000002-00000003-00000004\n"},
    {"net/unix/max_dgram_qlen", "3\n"},
    {"net/ipv4/ip_local_reserved_ports", "8000,8002,8004,8006,8008,8010,8012,8014,8016,8018,8020,8022,8024,8026,8028,8030\n"},
};
enum { NETWORK_WISHES = sizeof network_wishes / sizeof *network_wishes };

static void look_at_network_wishes(void) {
  for (int n = 0; n < NETWORK_WISHES; n++) {
    char path[100];
    snprintf(path, sizeof path, "/proc/sys/%s", network_wishes[n].name);
    char *now = contents(path, 0);
    if (strcmp(now, network_wishes[n].value))
      say("%s is %s", path, now);
    CHECK(!strcmp(now, network_wishes[n].value));
    free(now);
  }
}

static void network_settings_child(long up) {
  enter_new(CLONE_NEWNET);
  if (up)
    loopback(1);
  write_setting("net/ipv4/ip_default_ttl", up ? "33" : "34");
  arrive();
  wait_go();
  EQUAL(setting("net/ipv4/ip_default_ttl"), up ? 33 : 34);
  EQUAL(setting("net/core/somaxconn"), 4096);
  EQUAL(!!loopback(0), up);
}

// As containers have them. What the kernel has of others in new namespaces must be as it was, too.
static void network_settings(void) {
  open_board();
  pid_t pids[2] = {child(network_settings_child, 0), child(network_settings_child, 1)};
  enter_new(CLONE_NEWNET);
  loopback(1);
  // The range must not reach below it.
  write_setting("net/ipv4/ip_unprivileged_port_start", "80");
  for (int n = 0; n < NETWORK_WISHES; n++)
    write_setting(network_wishes[n].name, network_wishes[n].value);
  look_at_network_wishes();
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(80), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  int door = socket(AF_INET, SOCK_STREAM, 0);
  MUST(door >= 0 && !bind(door, (void *)&a, sizeof a) && !listen(door, 1000));
  await_arrivals(2);
  cut();
  look_at_network_wishes();
  EQUAL(setting("net/ipv4/ip_unprivileged_port_start"), 80);
  EQUAL(setting("net/ipv4/ip_default_ttl"), 64);
  int c = socket(AF_INET, SOCK_STREAM, 0);
  EQUAL(connect(c, (void *)&a, sizeof a), 0);
  socklen_t length = sizeof a;
  EQUAL(getsockname(c, (void *)&a, &length), 0);
  CHECK(ntohs(a.sin_port) >= 100 && ntohs(a.sin_port) <= 200);
  for (int n = 0; n < 2; n++)
    await_ok(pids[n]);
}

// A request of netlink that is being put together.
struct request {
  struct nlmsghdr head;
  char rest[400];
};

static struct request begin_request(int kind, const void *body, size_t length) {
  struct request m = {.head = {.nlmsg_len = NLMSG_LENGTH(length), .nlmsg_type = kind}};
  memcpy(m.rest, body, length);
  return m;
}

static void attribute(struct request *m, int kind, const void *value, size_t length) {
  struct rtattr head = {.rta_len = RTA_LENGTH(length), .rta_type = kind};
  char *at = (char *)m + NLMSG_ALIGN(m->head.nlmsg_len);
  memcpy(at, &head, sizeof head);
  memcpy(at + sizeof head, value, length);
  m->head.nlmsg_len = NLMSG_ALIGN(m->head.nlmsg_len) + RTA_ALIGN(head.rta_len);
}

static void number_attribute(struct request *m, int kind, unsigned value) {
  attribute(m, kind, &value, sizeof value);
}

static void address_attribute(struct request *m, int kind, const char *address) {
  char bytes[16];
  int family = strchr(address, ':') ? AF_INET6 : AF_INET;
  MUST(inet_pton(family, address, bytes) == 1);
  attribute(m, kind, bytes, family == AF_INET6 ? 16 : 4);
}

static void ask(struct request m, int flags) {
  struct {
    struct nlmsghdr head;
    struct nlmsgerr error;
    char rest[1000];
  } answer;
  m.head.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | flags;
  int s = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
  MUST(s >= 0 && send(s, &m, m.head.nlmsg_len, 0) == m.head.nlmsg_len);
  MUST(recv(s, &answer, sizeof answer, 0) > 0 && answer.head.nlmsg_type == NLMSG_ERROR && !answer.error.error);
  close(s);
}

static int family_of(const char *address) { return strchr(address, ':') ? AF_INET6 : AF_INET; }

static void add_address(const char *address, int prefix) {
  struct ifaddrmsg head = {.ifa_family = family_of(address), .ifa_prefixlen = prefix, .ifa_index = 1};
  struct request m = begin_request(RTM_NEWADDR, &head, sizeof head);
  address_attribute(&m, IFA_LOCAL, address);
  address_attribute(&m, IFA_ADDRESS, address);
  ask(m, NLM_F_CREATE | NLM_F_EXCL);
}

static void route(int kind, const char *to, int prefix, int type, unsigned table, const char *gateway) {
  int scope = type == RTN_LOCAL ? RT_SCOPE_HOST : gateway ? RT_SCOPE_UNIVERSE : RT_SCOPE_LINK;
  struct rtmsg head = {.rtm_family = family_of(to), .rtm_dst_len = prefix, .rtm_type = type, .rtm_scope = scope,
                       .rtm_protocol = kind == RTM_NEWROUTE ? RTPROT_STATIC : RTPROT_UNSPEC};
  struct request m = begin_request(kind, &head, sizeof head);
  address_attribute(&m, RTA_DST, to);
  number_attribute(&m, RTA_TABLE, table);
  if (gateway)
    address_attribute(&m, RTA_GATEWAY, gateway);
  if (type == RTN_UNICAST || type == RTN_LOCAL)
    number_attribute(&m, RTA_OIF, 1);
  ask(m, kind == RTM_NEWROUTE ? NLM_F_CREATE | NLM_F_EXCL : 0);
}

static void rule(int kind, int family, unsigned priority, unsigned table, const char *from) {
  struct fib_rule_hdr head = {.family = family, .src_len = from ? 32 : 0, .action = FR_ACT_TO_TBL};
  struct request m = begin_request(kind, &head, sizeof head);
  number_attribute(&m, FRA_PRIORITY, priority);
  number_attribute(&m, FRA_TABLE, table);
  if (from)
    address_attribute(&m, FRA_SRC, from);
  ask(m, kind == RTM_NEWRULE ? NLM_F_CREATE : 0);
}

// All rows of a table, without the attribute that tells of times.
struct rows {
  size_t length;
  char bytes[1 << 16];
};

static struct rows *rows(int kind, size_t head, int times) {
  struct rows *all = calloc(1, sizeof *all);
  char none[32] = {0}, buffer[1 << 15];
  struct request m = begin_request(kind, none, head);
  m.head.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  int s = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE), done = 0;
  MUST(s >= 0 && send(s, &m, m.head.nlmsg_len, 0) == m.head.nlmsg_len);
  while (!done) {
    int n = recv(s, buffer, sizeof buffer, 0);
    MUST(n > 0);
    for (struct nlmsghdr *row = (void *)buffer; NLMSG_OK(row, n); row = NLMSG_NEXT(row, n)) {
      if ((done = row->nlmsg_type == NLMSG_DONE))
        break;
      MUST(row->nlmsg_type != NLMSG_ERROR);
      int rest = row->nlmsg_len - NLMSG_SPACE(head);
      for (struct rtattr *a = (void *)((char *)row + NLMSG_SPACE(head)); RTA_OK(a, rest); a = RTA_NEXT(a, rest))
        if (a->rta_type == times)
          memset(RTA_DATA(a), 0, RTA_PAYLOAD(a));
      size_t length = row->nlmsg_len - NLMSG_HDRLEN;
      MUST(all->length + length <= sizeof all->bytes);
      memcpy(all->bytes + all->length, NLMSG_DATA(row), length);
      all->length += length;
    }
  }
  close(s);
  return all;
}

static int are_same(struct rows *before, struct rows *after) {
  int same = before->length == after->length && !memcmp(before->bytes, after->bytes, before->length);
  free(before);
  free(after);
  return same;
}

static struct rows *address_rows(void) { return rows(RTM_GETADDR, sizeof(struct ifaddrmsg), IFA_CACHEINFO); }
static struct rows *route_rows(void) { return rows(RTM_GETROUTE, sizeof(struct rtmsg), RTA_CACHEINFO); }
static struct rows *rule_rows(void) { return rows(RTM_GETRULE, sizeof(struct fib_rule_hdr), 0); }

static int of_loopback(unsigned long command) {
  struct ifreq request = {.ifr_name = "lo"};
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  MUST(s >= 0 && !ioctl(s, command, &request));
  close(s);
  return request.ifr_mtu;
}

static void set_loopback(unsigned long command, int value) {
  struct ifreq request = {.ifr_name = "lo", .ifr_mtu = value};
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  MUST(s >= 0 && !ioctl(s, command, &request));
  close(s);
}

static socklen_t named_by(const char *address, int port, struct sockaddr_storage *a) {
  struct sockaddr_in *four = (void *)a;
  struct sockaddr_in6 *six = (void *)a;
  memset(a, 0, sizeof *a);
  a->ss_family = family_of(address);
  int is_six = a->ss_family == AF_INET6;
  MUST(inet_pton(a->ss_family, address, is_six ? (void *)&six->sin6_addr : (void *)&four->sin_addr) == 1);
  *(is_six ? &six->sin6_port : &four->sin_port) = htons(port);
  return is_six ? sizeof *six : sizeof *four;
}

static int door_at(const char *address, int port) {
  struct sockaddr_storage a;
  socklen_t length = named_by(address, port, &a);
  int s = socket(a.ss_family, SOCK_STREAM, 0);
  MUST(s >= 0);
  // A new address of IPv6 can be used in a moment.
  while (bind(s, (void *)&a, length))
    MUST(errno == EADDRNOTAVAIL && !usleep(1000));
  // And a moment later there is a way to it.
  int probe = socket(a.ss_family, SOCK_DGRAM, 0);
  MUST(probe >= 0);
  while (connect(probe, (void *)&a, length))
    MUST(errno == ENETUNREACH && !usleep(1000));
  close(probe);
  MUST(!listen(s, 5));
  return s;
}

static int connected_to(const char *address, int port) {
  struct sockaddr_storage a;
  socklen_t length = named_by(address, port, &a);
  int s = socket(a.ss_family, SOCK_STREAM, 0);
  CHECK(s >= 0 && !connect(s, (void *)&a, length));
  return s;
}

static void network_addresses(void) {
  static const char *const addresses[] = {"10.1.2.3", "fd00::5", "10.1.2.4", "fd00::6", "192.0.2.1"};
  enum { ALL = sizeof addresses / sizeof *addresses };
  int doors[ALL], ends[ALL][2];
  enter_new(CLONE_NEWNET);
  loopback(1);
  set_loopback(SIOCSIFMTU, 1400);
  set_loopback(SIOCSIFTXQLEN, 17);
  for (int n = 0; n < ALL; n++) {
    add_address(addresses[n], family_of(addresses[n]) == AF_INET6 ? 64 : 24);
    doors[n] = door_at(addresses[n], 80);
    ends[n][0] = connected_to(addresses[n], 80);
    MUST((ends[n][1] = accept(doors[n], 0, 0)) >= 0 && write(ends[n][0], addresses[n], 7) == 7);
  }
  struct rows *before = address_rows(), *routes = route_rows();
  cut();
  CHECK(are_same(before, address_rows()));
  CHECK(are_same(routes, route_rows()));
  EQUAL(of_loopback(SIOCGIFMTU), 1400);
  EQUAL(of_loopback(SIOCGIFTXQLEN), 17);
  for (int n = 0; n < ALL; n++) {
    char text[7];
    EQUAL(read(ends[n][1], text, 7), 7);
    CHECK(!memcmp(text, addresses[n], 7));
    close(connected_to(addresses[n], 80));
    CHECK(accept(doors[n], 0, 0) >= 0);
  }
}

static void network_routes(void) {
  enter_new(CLONE_NEWNET);
  loopback(1);
  add_address("10.1.2.3", 24);
  add_address("fd00::5", 64);
  close(door_at("fd00::5", 80));
  route(RTM_NEWROUTE, "10.9.0.0", 16, RTN_UNICAST, RT_TABLE_MAIN, 0);
  route(RTM_NEWROUTE, "10.8.0.0", 16, RTN_UNICAST, RT_TABLE_MAIN, "10.9.0.1");
  route(RTM_NEWROUTE, "198.51.100.0", 24, RTN_LOCAL, RT_TABLE_LOCAL, 0); // all of these are ours
  route(RTM_NEWROUTE, "203.0.113.0", 24, RTN_UNREACHABLE, 1000, 0);
  route(RTM_NEWROUTE, "2001:db8:1::", 48, RTN_LOCAL, RT_TABLE_LOCAL, 0);
  route(RTM_NEWROUTE, "2001:db8:2::", 48, RTN_BLACKHOLE, RT_TABLE_MAIN, 0);
  route(RTM_DELROUTE, "127.255.255.255", 32, RTN_BROADCAST, RT_TABLE_LOCAL, 0);
  rule(RTM_NEWRULE, AF_INET, 100, 1000, "10.1.2.3");
  rule(RTM_NEWRULE, AF_INET, 100, RT_TABLE_MAIN, "10.9.0.1"); // of two, the first counts
  rule(RTM_NEWRULE, AF_INET6, 70, RT_TABLE_MAIN, 0);
  rule(RTM_DELRULE, AF_INET, 32767, RT_TABLE_DEFAULT, 0);
  int door = door_at("198.51.100.7", 80), other = door_at("::", 81);
  struct rows *addresses = address_rows(), *routes = route_rows(), *rules = rule_rows();
  cut();
  CHECK(are_same(addresses, address_rows()));
  CHECK(are_same(routes, route_rows()));
  CHECK(are_same(rules, rule_rows()));
  close(connected_to("198.51.100.7", 80));
  CHECK(accept(door, 0, 0) >= 0);
  close(connected_to("2001:db8:1::9", 81));
  CHECK(accept(other, 0, 0) >= 0);
  struct sockaddr_storage from, to;
  socklen_t length = named_by("10.1.2.3", 0, &from), of_to = named_by("203.0.113.1", 80, &to);
  int s = socket(AF_INET, SOCK_DGRAM, 0);
  CHECK(!bind(s, (void *)&from, length));
  CHECK(connect(s, (void *)&to, of_to) && errno == EHOSTUNREACH);
}

// Settings may not allow any more what they did when a socket was made.
static void network_narrowed(void) {
  enter_new(CLONE_NEWNET);
  loopback(1);
  write_setting("net/unix/max_dgram_qlen", "20");
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(80), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "\0with a long queue"};
  int door = socket(AF_INET, SOCK_STREAM, 0);
  int to = socket(AF_UNIX, SOCK_DGRAM, 0), from = socket(AF_UNIX, SOCK_DGRAM, 0);
  MUST(!bind(door, (void *)&a, sizeof a) && !listen(door, 500) && !bind(to, (void *)&name, sizeof name));
  for (int n = 0; n < 15; n++)
    MUST(sendto(from, &n, sizeof n, MSG_DONTWAIT, (void *)&name, sizeof name) == sizeof n);
  write_setting("net/ipv4/ping_group_range", "4242\t4242");
  write_setting("net/unix/max_dgram_qlen", "2");
  write_setting("net/core/somaxconn", "5");
  cut();
  char *now = contents("/proc/sys/net/ipv4/ping_group_range", 0);
  CHECK(!strcmp(now, "4242\t4242\n"));
  free(now);
  EQUAL(setting("net/unix/max_dgram_qlen"), 2);
  EQUAL(setting("net/core/somaxconn"), 5);
  CHECK(socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP) < 0 && errno == EACCES);
  for (int n = 0, got; n < 15; n++) {
    EQUAL(recv(to, &got, sizeof got, MSG_DONTWAIT), (ssize_t)sizeof got);
    EQUAL(got, n);
  }
  // As many may wait as before.
  for (int n = 0; n < 50; n++) {
    int s = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    CHECK(!connect(s, (void *)&a, sizeof a) || errno == EINPROGRESS);
  }
  int accepted = 0;
  fcntl(door, F_SETFL, O_NONBLOCK);
  while (accept(door, 0, 0) >= 0)
    accepted++;
  EQUAL(accepted, 50);
}

// --- what must be refused

static void sockets_of_two_networks(void) {
  int outside = socket(AF_INET, SOCK_DGRAM, 0);
  enter_new(CLONE_NEWNET);
  int inside = socket(AF_INET, SOCK_DGRAM, 0);
  MUST(outside >= 0 && inside >= 0);
  cut();
  close(outside);
  close(inside);
}

static void network_with_a_bridge(void) {
  enter_new(CLONE_NEWNET);
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  MUST(s >= 0);
  if (ioctl(s, SIOCBRADDBR, "across"))
    SKIP("no bridges here");
  cut();
  CHECK(if_nametoindex("across"));
  close(s);
}

static void later_children(void) {
  enter_new(CLONE_NEWTIME);
  cut();
}

static void full_queue(void) {
  enter_new(CLONE_NEWIPC);
  mqd_t queue = posix_queue("/full", O_RDWR | O_CREAT | O_EXCL);
  if (queue < 0)
    SKIP("no message queues here");
  MUST(!mq_send(queue, "message", 8, 2) && !mq_close(queue));
  cut();
  char text[40];
  queue = mq_open("/full", O_RDWR);
  EQUAL(mq_receive(queue, text, sizeof text, 0), 8);
}

static void semaphore_undo(void) {
  enter_new(CLONE_NEWIPC);
  int id = semget(IPC_PRIVATE, 1, IPC_CREAT | 0600);
  struct sembuf give = {.sem_op = 1, .sem_flg = SEM_UNDO};
  MUST(id >= 0 && !semop(id, &give, 1));
  cut();
  EQUAL(semctl(id, 0, GETVAL), 1);
}

// Memory that was attached before the namespace was entered, where another segment has its id.
static void attached_before(void) {
  enter_new(CLONE_NEWIPC);
  int id = shmget(IPC_PRIVATE, PAGE, IPC_CREAT | 0600);
  char *memory = shmat(id, 0, 0);
  MUST(memory != (void *)-1);
  enter_new(CLONE_NEWIPC);
  EQUAL(shmget(IPC_PRIVATE, PAGE, IPC_CREAT | 0600), id);
  cut();
  memory[0] = 1;
}

// A process that is no descendant stays in the namespace.
static void shared_outside(void) {
  open_board();
  enter_new(CLONE_NEWUTS);
  name("both", "");
  pid_t between = fork();
  MUST(between >= 0);
  if (!between) {
    pid_t orphan = fork();
    MUST(orphan >= 0);
    if (!orphan) {
      arrive();
      wait_go();
    }
    _exit(0);
  }
  await_ok(between);
  await_arrivals(1);
  cut();
  named("both", "");
}

static void *in_a_namespace_alone(void *unused) {
  (void)unused;
  enter_new(CLONE_NEWUTS);
  arrive();
  wait_go();
  return 0;
}

// Threads of one process in different namespaces.
static void parted_threads(void) {
  open_board();
  pthread_t thread = spawn(in_a_namespace_alone, 0);
  await_arrivals(1);
  cut();
  pthread_join(thread, 0);
}

SCENARIOS({"host_name", host_name}, {"host_names", host_names}, {"host_name_below", host_name_below},
          {"ipc_objects", ipc_objects}, {"posix_queues", posix_queues}, {"ipc_apart", ipc_apart},
          {"clocks", clocks}, {"control_groups", control_groups}, {"networks", networks},
          {"network_of_sockets", network_of_sockets}, {"network_sockets", network_sockets}, {"sockets_of_two_networks", sockets_of_two_networks},
          {"network_settings", network_settings}, {"network_addresses", network_addresses}, {"network_routes", network_routes}, {"network_narrowed", network_narrowed}, {"network_with_a_bridge", network_with_a_bridge}, {"later_children", later_children},
          {"full_queue", full_queue}, {"semaphore_undo", semaphore_undo}, {"attached_before", attached_before},
          {"shared_outside", shared_outside}, {"parted_threads", parted_threads})
