// A program that talks to itself over everything one can talk over: connections over the network, unix sockets, pipes, a FIFO, an
// eventfd. Whoever receives checks each byte, so that one which is lost, or comes twice, or comes from another time, is noticed. It says so
// in lines, each when all have come further, and in a line what is wrong.
//
// `channels`: the threads of one process. `channels apart`: who receives, and who sends, are different processes. `channels apart small`:
// no connection over the network holds much, so that all that is on its way is little at any time.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <fcntl.h>
#include <unistd.h>

#define MUST(x)                                                                 \
  do                                                                            \
    if (!(x)) {                                                                 \
      dprintf(1, "wrong: %s:%d: %s (errno %d)\n", __FILE__, __LINE__, #x, errno); \
      _exit(1);                                                                 \
    }                                                                           \
  while (0)

#define MOST 24
#define LONGEST 60000

static int small;

static struct channel {
  const char *name;
  int from, to, is_of_messages, is_counter;
  volatile uint64_t received;
} *channels;
static int count;

static uint64_t next(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static unsigned char at(uint64_t position) {
  return position * 0x9e3779b97f4a7c15 >> 56;
}

static void rest(uint64_t *state) {
  uint64_t r = next(state) % 1000;
  // Mostly what is sent is received at once, and at times nothing fits any more.
  if (r < 4) usleep(30000);
  else if (r < 300) usleep(r);
}

static void *send_all(void *its) {
  struct channel *c = its;
  unsigned char buf[LONGEST];
  uint64_t sent = 0, state = 88172645463325252 + (c - channels);
  for (;;) {
    rest(&state);
    size_t most = next(&state) % 8 ? 700 : c->is_of_messages ? 9000 : LONGEST, n = 9 + next(&state) % (most - 9);
    if (c->is_counter) {
      uint64_t more = 1 + n % 9;
      MUST(write(c->to, &more, 8) == 8);
      sent += more;
      for (;;) {
        uint64_t received = c->received;
        MUST(received <= sent);
        if (received == sent) break;
        usleep(100);
      }
      continue;
    }
    for (size_t i = 0; i < n; i++) buf[i] = at(sent + i);
    if (c->is_of_messages) memcpy(buf, &sent, 8);
    for (size_t done = 0; done < n;) {
      ssize_t now = write(c->to, buf + done, n - done);
      MUST(now > 0 && (!c->is_of_messages || now == (ssize_t)n));
      done += now;
    }
    sent += n;
  }
}

static void *receive_all(void *its) {
  struct channel *c = its;
  unsigned char buf[LONGEST];
  uint64_t received = 0, state = 1234567891234567 + (c - channels);
  for (;;) {
    rest(&state);
    size_t room = c->is_of_messages ? LONGEST : 1 + next(&state) % LONGEST;
    if (c->is_counter) {
      uint64_t more;
      MUST(read(c->from, &more, 8) == 8);
      received += more;
    } else {
      ssize_t n = read(c->from, buf, room);
      MUST(n > 0);
      size_t begin = 0;
      if (c->is_of_messages) {
        uint64_t which;
        memcpy(&which, buf, 8);
        MUST(which == received);
        begin = 8;
      }
      for (ssize_t i = begin; i < n; i++)
        if (buf[i] != at(received + i)) {
          dprintf(1, "wrong: %s: byte %lu\n", c->name, (unsigned long)(received + i));
          _exit(1);
        }
      received += n;
    }
    c->received = received;
  }
}

static void add(const char *name, int from, int to, int is_of_messages) {
  channels[count++] = (struct channel){name, from, to, is_of_messages, 0, 0};
}

static void both_ways(const char *name, int a, int b, int is_of_messages) {
  add(name, a, b, is_of_messages);
  add(name, b, a, is_of_messages);
}

static void tcp(const char *name, int family, int option) {
  struct sockaddr_storage address = {.ss_family = family};
  socklen_t length = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
  if (family == AF_INET) ((struct sockaddr_in *)&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  else ((struct sockaddr_in6 *)&address)->sin6_addr = in6addr_loopback;
  int door = socket(family, SOCK_STREAM, 0), client = socket(family, SOCK_STREAM, 0);
  if (bind(door, (void *)&address, length)) return; // no such addresses here
  int size = 32 << 10;
  for (int i = 0; small && i < 4; i++) // before they know each other
    MUST(!setsockopt(i / 2 ? door : client, SOL_SOCKET, i % 2 ? SO_SNDBUF : SO_RCVBUF, &size, sizeof size));
  // A window that is smaller than a segment, and another direction that is never silent, stop a connection for good: its probe of the
  // window is put off again and again (seen with Linux 6.18 over the loopback interface).
  int segment = 4 << 10;
  for (int i = 0; small && i < 2; i++)
    MUST(!setsockopt(i ? door : client, IPPROTO_TCP, TCP_MAXSEG, &segment, sizeof segment));
  MUST(!listen(door, 1) && !getsockname(door, (void *)&address, &length));
  MUST(!connect(client, (void *)&address, length));
  int server = accept(door, NULL, NULL), one = 1;
  MUST(server >= 0);
  if (option) MUST(!setsockopt(client, IPPROTO_TCP, option, &one, sizeof one));
  both_ways(name, client, server, 0);
}

static void pair(const char *name, int kind) {
  int ends[2];
  MUST(!socketpair(AF_UNIX, kind, 0, ends));
  both_ways(name, ends[0], ends[1], kind != SOCK_STREAM);
}

static void start(void *(*what)(void *), struct channel *c) {
  pthread_t thread;
  pthread_attr_t attributes;
  MUST(!pthread_attr_init(&attributes) && !pthread_attr_setstacksize(&attributes, 256 << 10));
  MUST(!pthread_create(&thread, &attributes, what, c));
}

int main(int argc, char **argv) {
  int apart = argc > 1 && !strcmp(argv[1], "apart"), ends[2];
  small = argc > 2 && !strcmp(argv[2], "small");
  channels = mmap(NULL, MOST * sizeof *channels, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  MUST(channels != MAP_FAILED);
  tcp("TCP over IPv4", AF_INET, 0);
  tcp("TCP over IPv4 at once", AF_INET, TCP_NODELAY);
  tcp("TCP over IPv4 held back", AF_INET, TCP_CORK);
  tcp("TCP over IPv6", AF_INET6, 0);
  pair("a stream", SOCK_STREAM);
  pair("packets", SOCK_SEQPACKET);
  pair("datagrams", SOCK_DGRAM);
  MUST(!pipe(ends));
  add("a pipe", ends[0], ends[1], 0);
  char fifo[64];
  snprintf(fifo, sizeof fifo, "fifo-%d", getpid());
  MUST(!mkfifo(fifo, 0600));
  int read_end = open(fifo, O_RDONLY | O_NONBLOCK), write_end = open(fifo, O_WRONLY);
  MUST(read_end >= 0 && write_end >= 0 && !fcntl(read_end, F_SETFL, 0));
  add("a FIFO", read_end, write_end, 0);
  int event = eventfd(0, 0);
  add("an eventfd", event, event, 0);
  channels[count - 1].is_counter = 1;
  int receives = 1, sends = 1;
  if (apart) {
    int parent = getpid(), child = fork();
    MUST(child >= 0);
    receives = child == 0;
    sends = !receives;
    if (receives) MUST(!prctl(PR_SET_PDEATHSIG, SIGKILL) && getppid() == parent);
  }
  for (int i = 0; i < count; i++) {
    if (sends) start(send_all, &channels[i]);
    if (receives) start(receive_all, &channels[i]);
  }
  if (!sends) for (;;) pause();
  uint64_t before[MOST] = {0};
  for (uint64_t line = 1;; line++) {
    for (int i = 0; i < count; i++)
      while (channels[i].received < before[i] + (channels[i].is_counter ? 1 : 2000)) usleep(500);
    for (int i = 0; i < count; i++) before[i] = channels[i].received;
    dprintf(1, "%lu\n", (unsigned long)line);
  }
}
