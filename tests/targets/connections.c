// Connections between two sockets of the program: what was on its way, halves that have ended, options; datagrams.
#include "target.h"
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

typedef union {
  struct sockaddr any;
  struct sockaddr_in v4;
  struct sockaddr_in6 v6;
  char raw[28];
} address;

static address loopback(int family, int mapped) {
  address a;
  memset(&a, 0, sizeof a);
  a.any.sa_family = family;
  if (family == AF_INET) {
    a.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  } else if (mapped) {
    a.v6.sin6_addr.s6_addr[10] = a.v6.sin6_addr.s6_addr[11] = 0xff;
    a.v6.sin6_addr.s6_addr[12] = 127;
    a.v6.sin6_addr.s6_addr[15] = 1;
  } else {
    a.v6.sin6_addr = in6addr_loopback;
  }
  return a;
}

static socklen_t size_of(const address *a) {
  return a->any.sa_family == AF_INET ? sizeof a->v4 : sizeof a->v6;
}

static address name_of(int s, int peer) {
  address a;
  memset(&a, 0, sizeof a);
  socklen_t length = sizeof a;
  MUST((peer ? getpeername : getsockname)(s, &a.any, &length) == 0);
  return a;
}

// The kernel makes ordinary users wait for a minute for a port that others have not shared.
static void share(int l) {
  int one = 1;
  if (geteuid())
    MUST(setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
}

// A socket that listens, and connections to it from within: s[0] has connected, s[1] was accepted.
static int door(int family, int mapped) {
  int l = socket(family, SOCK_STREAM, 0);
  address a = loopback(family, mapped);
  share(l);
  if (l < 0 || bind(l, &a.any, size_of(&a)))
    SKIP("no loopback of this family");
  MUST(listen(l, 8) == 0);
  return l;
}

static void connected(int l, int s[2]) {
  address a = name_of(l, 0);
  MUST((s[0] = socket(a.any.sa_family, SOCK_STREAM, 0)) >= 0 && connect(s[0], &a.any, size_of(&a)) == 0);
  MUST((s[1] = accept(l, 0, 0)) >= 0);
}

static void *bytes(size_t n, uint64_t seed) {
  void *p = malloc(n);
  fill(p, n, seed);
  return p;
}

static void put(int s, size_t n, uint64_t seed) {
  char *p = bytes(n, seed);
  MUST(send(s, p, n, 0) == (ssize_t)n);
  free(p);
}

static void take(int s, size_t n, uint64_t seed) {
  char *p = calloc(1, n);
  EQUAL(recv(s, p, n, MSG_WAITALL), n);
  CHECK(filled(p, n, seed));
  free(p);
}

static int unread(int s) {
  int n = -1;
  ioctl(s, FIONREAD, &n);
  return n;
}

static void arrived(int s, int n) {
  for (int i = 0; i < 1000 && unread(s) < n; i++)
    nap(0.001);
  MUST(unread(s) == n);
}

static int state(int s) {
  struct tcp_info info = {0};
  socklen_t length = sizeof info;
  getsockopt(s, IPPROTO_TCP, TCP_INFO, &info, &length);
  return info.tcpi_state;
}

static void reached(int s, int wanted) {
  for (int i = 0; i < 1000 && state(s) != wanted; i++)
    nap(0.001);
  MUST(state(s) == wanted);
}

static void answers(int s[2]) {
  char c = 0;
  EQUAL(write(s[0], "q", 1), 1);
  EQUAL(recv(s[1], &c, 1, MSG_WAITALL), 1);
  EQUAL(c, 'q');
  EQUAL(write(s[1], "a", 1), 1);
  EQUAL(recv(s[0], &c, 1, MSG_WAITALL), 1);
  EQUAL(c, 'a');
}

static void same(const address *a, const address *b) {
  CHECK(size_of(a) == size_of(b) && !memcmp(a, b, size_of(a)));
}

static void idle_and_unread(int family, int mapped) {
  int l = door(family, mapped), idle[2], full[2];
  connected(l, idle);
  connected(l, full);
  put(full[0], 40000, 1);
  put(full[1], 24, 2);
  arrived(full[1], 40000);
  arrived(full[0], 24);
  address names[4] = {name_of(full[0], 0), name_of(full[0], 1), name_of(full[1], 0), name_of(full[1], 1)};
  cut();
  for (int i = 0; i < 4; i++) {
    address now = name_of(full[i / 2], i % 2);
    same(&now, &names[i]);
  }
  EQUAL(unread(full[1]), 40000);
  EQUAL(unread(full[0]), 24);
  take(full[1], 40000, 1);
  take(full[0], 24, 2);
  answers(full);
  answers(idle);
  int more[2];
  connected(l, more); // the port is shared with those that were accepted before
  answers(more);
}

static void pair4(void) {
  idle_and_unread(AF_INET, 0);
}

static void pair6(void) {
  idle_and_unread(AF_INET6, 0);
}

static void pair_mapped(void) {
  idle_and_unread(AF_INET6, 1);
}

static void two_families(void) { // connected by IPv4, accepted by a socket of IPv6
  int l = socket(AF_INET6, SOCK_STREAM, 0), s[2];
  address any, to = loopback(AF_INET, 0);
  memset(&any, 0, sizeof any);
  any.any.sa_family = AF_INET6;
  share(l);
  if (l < 0 || bind(l, &any.any, sizeof any.v6))
    SKIP("no IPv6");
  MUST(listen(l, 3) == 0);
  to.v4.sin_port = name_of(l, 0).v6.sin6_port;
  MUST((s[0] = socket(AF_INET, SOCK_STREAM, 0)) >= 0 && connect(s[0], &to.any, sizeof to.v4) == 0);
  MUST((s[1] = accept(l, 0, 0)) >= 0);
  put(s[0], 800, 3);
  arrived(s[1], 800);
  cut();
  take(s[1], 800, 3);
  answers(s);
}

static void no_door(void) { // the socket that accepted it is closed
  int l = door(AF_INET, 0), s[2];
  connected(l, s);
  close(l);
  put(s[1], 8, 4);
  arrived(s[0], 8);
  cut();
  take(s[0], 8, 4);
  answers(s);
}

static size_t stuff(int s, uint64_t seed) { // until there is no room
  size_t sent = 0, room = 64 << 20;
  char *p = bytes(room, seed);
  int waits = 0;
  while (waits < 30) {
    ssize_t n = send(s, p + sent, room - sent > 8192 ? 8192 : room - sent, MSG_DONTWAIT);
    if (n < 0) {
      MUST(errno == EAGAIN);
      nap(0.01);
      waits++;
    } else {
      sent += n;
      waits = 0;
    }
  }
  free(p);
  return sent;
}

static int unsent(int s) {
  int n = -1;
  ioctl(s, TIOCOUTQ, &n);
  return n;
}

static void full(void) { // both directions, with the readers far behind
  int l = door(AF_INET, 0), s[2];
  connected(l, s);
  size_t there = stuff(s[0], 5), back = stuff(s[1], 6);
  MUST(unsent(s[0]) > 0 && unsent(s[1]) > 0);
  int before[2] = {unread(s[0]), unread(s[1])};
  cut();
  CHECK(unread(s[0]) >= before[0]);
  CHECK(unread(s[1]) >= before[1]);
  char *p = malloc(there > back ? there : back);
  for (int i = 0; i < 2; i++) {
    size_t n = i ? back : there;
    EQUAL(recv(s[!i], p, n, MSG_WAITALL), n);
    char *wanted = bytes(64 << 20, 5 + i);
    CHECK(!memcmp(p, wanted, n));
    free(wanted);
  }
  EQUAL(unread(s[0]) + unread(s[1]), 0);
  answers(s);
}

static void half_closed(void) {
  int l = door(AF_INET, 0), ours[2], theirs[2], both[2];
  connected(l, ours);
  connected(l, theirs);
  connected(l, both);
  put(ours[0], 160, 7);
  MUST(shutdown(ours[0], SHUT_WR) == 0);
  MUST(shutdown(theirs[1], SHUT_WR) == 0);
  put(theirs[0], 320, 8);
  put(both[0], 80, 9);
  put(both[1], 88, 10);
  MUST(shutdown(both[0], SHUT_WR) == 0 && shutdown(both[1], SHUT_WR) == 0);
  reached(ours[0], TCP_FIN_WAIT2);
  reached(ours[1], TCP_CLOSE_WAIT);
  reached(theirs[0], TCP_CLOSE_WAIT);
  reached(both[0], TCP_CLOSE);
  reached(both[1], TCP_CLOSE);
  cut();
  reached(ours[0], TCP_FIN_WAIT2); // the kernel takes its time to acknowledge an end
  reached(theirs[0], TCP_CLOSE_WAIT);
  char c;
  take(ours[1], 160, 7);
  EQUAL(read(ours[1], &c, 1), 0);
  put(ours[1], 16, 12);
  take(ours[0], 16, 12);
  EQUAL(send(ours[0], "x", 1, MSG_NOSIGNAL), -1);
  EQUAL(errno, EPIPE);
  take(theirs[1], 320, 8);
  EQUAL(read(theirs[0], &c, 1), 0);
  take(both[1], 80, 9);
  take(both[0], 88, 10);
  EQUAL(read(both[0], &c, 1), 0);
  EQUAL(read(both[1], &c, 1), 0);
  EQUAL(send(both[0], "x", 1, MSG_NOSIGNAL), -1);
}

static void crowded(void) { // one that has ended its half, behind what was not yet sent
  int l = door(AF_INET, 0), s[2];
  connected(l, s);
  size_t n = stuff(s[0], 11);
  MUST(shutdown(s[0], SHUT_WR) == 0);
  cut();
  char *p = malloc(n), *wanted = bytes(64 << 20, 11), c;
  EQUAL(recv(s[1], p, n, MSG_WAITALL), n);
  CHECK(!memcmp(p, wanted, n));
  EQUAL(read(s[1], &c, 1), 0);
  put(s[1], 8, 13);
  take(s[0], 8, 13);
}

static void other_end_closed(void) {
  int l = door(AF_INET, 0), ended[2], reset[2];
  connected(l, ended);
  connected(l, reset);
  put(ended[0], 4000, 14);
  close(ended[0]);
  put(reset[0], 800, 15);
  arrived(reset[1], 800);
  struct linger at_once = {1, 0};
  MUST(setsockopt(reset[0], SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
  close(reset[0]);
  arrived(ended[1], 4000);
  reached(ended[1], TCP_CLOSE_WAIT);
  reached(reset[1], TCP_CLOSE);
  cut();
  char c;
  EQUAL(state(ended[1]), TCP_CLOSE_WAIT);
  take(ended[1], 4000, 14);
  EQUAL(read(ended[1], &c, 1), 0);
  struct pollfd events = {reset[1], POLLIN | POLLRDHUP, 0};
  EQUAL(poll(&events, 1, 0), 1);
  CHECK(events.revents & POLLERR && events.revents & POLLHUP);
  take(reset[1], 800, 15);
  EQUAL(read(reset[1], &c, 1), -1);
  EQUAL(errno, ECONNRESET);
}

static const int options[][3] = {
    {SOL_SOCKET, SO_REUSEADDR, 1},       {SOL_SOCKET, SO_KEEPALIVE, 1},      {SOL_SOCKET, SO_OOBINLINE, 1},
    {SOL_SOCKET, SO_RCVLOWAT, 7},        {SOL_SOCKET, SO_PRIORITY, 3},       {SOL_SOCKET, SO_SNDBUF, 30000},
    {SOL_SOCKET, SO_RCVBUF, 50000},      {IPPROTO_IP, IP_TOS, 0x10},         {IPPROTO_IP, IP_TTL, 44},
    {IPPROTO_TCP, TCP_NODELAY, 1},       {IPPROTO_TCP, TCP_KEEPIDLE, 77},    {IPPROTO_TCP, TCP_KEEPINTVL, 11},
    {IPPROTO_TCP, TCP_KEEPCNT, 5},       {IPPROTO_TCP, TCP_USER_TIMEOUT, 4321}, {IPPROTO_TCP, TCP_LINGER2, 33},
    {IPPROTO_TCP, TCP_NOTSENT_LOWAT, 9999}, {IPPROTO_TCP, TCP_QUICKACK, 1},
};

static int option(int s, int i) {
  int value = -1;
  socklen_t length = sizeof value;
  getsockopt(s, options[i][0], options[i][1], &value, &length);
  return value;
}

static void with_options(void) {
  int l = door(AF_INET, 0), s[2], before[2][COUNT(options)];
  connected(l, s);
  char reno[16] = "reno", name[16] = "";
  setsockopt(s[0], IPPROTO_TCP, TCP_CONGESTION, reno, 4);
  for (size_t i = 0; i < COUNT(options); i++)
    MUST(setsockopt(s[0], options[i][0], options[i][1], &options[i][2], sizeof(int)) == 0);
  struct linger linger = {1, 9}, seen = {0, 0};
  MUST(setsockopt(s[1], SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
  MUST(fcntl(s[1], F_SETFL, O_RDWR | O_NONBLOCK) == 0);
  for (size_t i = 0; i < COUNT(options); i++)
    for (int k = 0; k < 2; k++)
      before[k][i] = option(s[k], i);
  cut();
  for (size_t i = 0; i < COUNT(options); i++)
    for (int k = 0; k < 2; k++) {
      int grows = options[i][1] == SO_SNDBUF || options[i][1] == SO_RCVBUF;
      if (options[i][0] == SOL_SOCKET && grows && k == 1)
        continue; // the kernel chooses that
      if (options[i][0] == IPPROTO_TCP && options[i][1] == TCP_QUICKACK)
        continue; // and changes that as data flows
      if (option(s[k], i) != before[k][i]) {
        say("option %d/%d of %d is %d, expected %d", options[i][0], options[i][1], k, option(s[k], i), before[k][i]);
        CHECK(!"options kept");
      }
    }
  socklen_t length = sizeof seen;
  getsockopt(s[1], SOL_SOCKET, SO_LINGER, &seen, &length);
  EQUAL(seen.l_linger, 9);
  length = sizeof name;
  getsockopt(s[0], IPPROTO_TCP, TCP_CONGESTION, name, &length);
  CHECK(!strcmp(name, "reno"));
  EQUAL(fcntl(s[1], F_GETFL) & O_NONBLOCK, O_NONBLOCK);
  int zero = 0;
  setsockopt(s[0], SOL_SOCKET, SO_RCVLOWAT, &zero, sizeof zero);
  fcntl(s[1], F_SETFL, O_RDWR);
  answers(s);
}

static void corked(void) {
  int l = door(AF_INET, 0), s[2], one = 1, zero = 0;
  connected(l, s);
  MUST(setsockopt(s[0], IPPROTO_TCP, TCP_CORK, &one, sizeof one) == 0);
  put(s[0], 16, 16);
  cut();
  socklen_t length = sizeof zero;
  int cork = 0;
  EQUAL(getsockopt(s[0], IPPROTO_TCP, TCP_CORK, &cork, &length), 0);
  EQUAL(cork, 1);
  setsockopt(s[0], IPPROTO_TCP, TCP_CORK, &zero, sizeof zero);
  take(s[1], 16, 16);
  answers(s);
}

static void watched(void) { // an epoll that is told of it, once each
  int l = door(AF_INET, 0), s[2], e = epoll_create1(0);
  connected(l, s);
  struct epoll_event in = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = 77};
  MUST(epoll_ctl(e, EPOLL_CTL_ADD, s[1], &in) == 0);
  cut();
  struct epoll_event event = {0};
  EQUAL(epoll_wait(e, &event, 1, 0), 0);
  EQUAL(write(s[0], "w", 1), 1);
  EQUAL(epoll_wait(e, &event, 1, 2000), 1);
  EQUAL(event.data.u64, 77);
}

static int stop;

static void *echo(void *argument) {
  int s = *(int *)argument;
  char buffer[3000];
  for (ssize_t n; (n = read(s, buffer, sizeof buffer)) > 0;)
    for (ssize_t done = 0, m; done < n; done += m)
      if ((m = write(s, buffer + done, n - done)) <= 0)
        return (void *)1;
  return 0;
}

// Calls that wait come back with less when the program was stopped meanwhile.
static int all(ssize_t (*call)(int, void *, size_t), int s, void *at, size_t n) {
  for (size_t done = 0; done < n;) {
    ssize_t m = call(s, (char *)at + done, n - done);
    if (m <= 0)
      return 0;
    done += m;
  }
  return 1;
}

static ssize_t put_some(int s, void *at, size_t n) {
  return write(s, at, n);
}

static void *ask(void *argument) {
  int s = *(int *)argument;
  uint64_t sent[1000], got[1000], seed = s;
  while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
    size_t n = 8 * (1 + mix(seed) % 999);
    fill(sent, n, ++seed);
    if (!all(put_some, s, sent, n) || !all(read, s, got, n) || memcmp(sent, got, n)) {
      CHECK(!"the echo is what was said");
      break;
    }
  }
  shutdown(s, SHUT_WR);
  return 0;
}

static void busy(void) { // data is on its way at every moment
  int l = door(AF_INET, 0), s[4][2];
  pthread_t threads[4][2];
  for (int i = 0; i < 4; i++) {
    connected(l, s[i]);
    threads[i][0] = spawn(ask, &s[i][0]);
    threads[i][1] = spawn(echo, &s[i][1]);
  }
  cut();
  nap(0.3);
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < 8; i++) {
    void *result;
    pthread_join(threads[i / 2][i % 2], &result);
    CHECK(!result);
  }
}

static void blocked(void) { // threads that wait for room, and for data
  int l = door(AF_INET, 0), s[2], t[2];
  connected(l, s);
  connected(l, t);
  pthread_t echoing = spawn(echo, &t[1]);
  cut();
  answers(s);
  EQUAL(write(t[0], "echo", 4), 4);
  char c[4];
  EQUAL(recv(t[0], c, 4, MSG_WAITALL), 4);
  CHECK(!memcmp(c, "echo", 4));
  shutdown(t[0], SHUT_WR);
  pthread_join(echoing, 0);
}

#define MANY 300

static void many(void) {
  int l = door(AF_INET, 0), s[MANY][2];
  for (int i = 0; i < MANY; i++) {
    connected(l, s[i]);
    put(s[i][i % 2], 8 * (i + 1), i);
    arrived(s[i][!(i % 2)], 8 * (i + 1));
  }
  cut();
  for (int i = 0; i < MANY; i++) {
    take(s[i][!(i % 2)], 8 * (i + 1), i);
    answers(s[i]);
  }
}


// --- without connections

static int datagrams(address *a) {
  int s = socket(a->any.sa_family, SOCK_DGRAM, 0);
  if (s < 0 || bind(s, &a->any, size_of(a)))
    SKIP("no loopback of this family");
  *a = name_of(s, 0);
  return s;
}

static void datagrams_unread(void) {
  address a = loopback(AF_INET, 0), b = loopback(AF_INET, 0), any = loopback(AF_INET, 0), from;
  any.v4.sin_addr.s_addr = INADDR_ANY;
  int s[2] = {datagrams(&a), datagrams(&b)}, wide = datagrams(&any), talk = datagrams(&(address){.any.sa_family = AF_INET});
  MUST(connect(talk, &a.any, size_of(&a)) == 0);
  MUST(sendto(s[0], "to b", 4, 0, &b.any, size_of(&b)) == 4);
  MUST(sendto(s[0], "again", 5, 0, &b.any, size_of(&b)) == 5);
  any.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  MUST(sendto(s[1], "wide", 4, 0, &any.any, size_of(&any)) == 4);
  cut();
  char c[16];
  socklen_t length = sizeof from;
  EQUAL(recvfrom(s[1], c, sizeof c, MSG_DONTWAIT, &from.any, &length), 4);
  CHECK(!memcmp(c, "to b", 4));
  same(&from, &a);
  EQUAL(recv(s[1], c, sizeof c, MSG_DONTWAIT), 5);
  EQUAL(recv(wide, c, sizeof c, MSG_DONTWAIT), 4);
  EQUAL(recv(wide, c, sizeof c, MSG_DONTWAIT), -1);
  EQUAL(send(talk, "hello", 5, 0), 5);
  EQUAL(recv(s[0], c, sizeof c, 0), 5);
}

// Bound to an address, and to a port only when they are connected (`IP_BIND_ADDRESS_NO_PORT`).
static void without_port(void) {
  enum { NO_PORT = 24 };
  static const int kinds[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_DGRAM};
  address own = loopback(AF_INET, 0), to, seen;
  own.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 8);
  int listens = door(AF_INET, 0), s[COUNT(kinds)], one = 1, zero = 0;
  to = name_of(listens, 0);
  for (size_t i = 0; i < COUNT(kinds); i++) {
    MUST((s[i] = socket(AF_INET, kinds[i], 0)) >= 0 && setsockopt(s[i], IPPROTO_IP, NO_PORT, &one, sizeof one) == 0);
    MUST(bind(s[i], &own.any, size_of(&own)) == 0);
  }
  // One that says otherwise by now.
  MUST(setsockopt(s[2], IPPROTO_IP, NO_PORT, &zero, sizeof zero) == 0);
  cut();
  for (size_t i = 0; i < COUNT(kinds); i++) {
    seen = name_of(s[i], 0);
    same(&seen, &own);
    EQUAL(connect(s[i], &to.any, size_of(&to)), 0);
    seen = name_of(s[i], 0);
    EQUAL(seen.v4.sin_addr.s_addr, own.v4.sin_addr.s_addr);
    CHECK(seen.v4.sin_port != 0);
    int is = -1;
    socklen_t length = sizeof is;
    EQUAL(getsockopt(s[i], IPPROTO_IP, NO_PORT, &is, &length), 0);
    EQUAL(is, i < 2);
  }
}

static void groups(void) {
  address a = loopback(AF_INET, 0);
  a.v4.sin_addr.s_addr = INADDR_ANY;
  int s = datagrams(&a), none = datagrams(&(address){.any.sa_family = AF_INET}), ttl = 3;
  struct ip_mreqn join = {.imr_multiaddr.s_addr = inet_addr("239.7.7.7"), .imr_address.s_addr = htonl(INADDR_LOOPBACK)};
  if (setsockopt(s, IPPROTO_IP, IP_ADD_MEMBERSHIP, &join, sizeof join))
    SKIP("no groups on the loopback device");
  struct ip_mreq_source one = {.imr_multiaddr.s_addr = inet_addr("239.8.8.8"),
                               .imr_interface.s_addr = htonl(INADDR_LOOPBACK),
                               .imr_sourceaddr.s_addr = htonl(INADDR_LOOPBACK)};
  MUST(setsockopt(s, IPPROTO_IP, IP_ADD_SOURCE_MEMBERSHIP, &one, sizeof one) == 0);
  MUST(setsockopt(s, IPPROTO_IP, IP_MULTICAST_TTL, &ttl, sizeof ttl) == 0);
  cut();
  EQUAL(setsockopt(s, IPPROTO_IP, IP_ADD_MEMBERSHIP, &join, sizeof join), -1);
  EQUAL(errno, EADDRINUSE);
  EQUAL(setsockopt(s, IPPROTO_IP, IP_DROP_MEMBERSHIP, &join, sizeof join), 0);
  EQUAL(setsockopt(s, IPPROTO_IP, IP_DROP_SOURCE_MEMBERSHIP, &one, sizeof one), 0);
  EQUAL(setsockopt(none, IPPROTO_IP, IP_DROP_MEMBERSHIP, &join, sizeof join), -1);
  socklen_t length = sizeof ttl;
  ttl = 0;
  getsockopt(s, IPPROTO_IP, IP_MULTICAST_TTL, &ttl, &length);
  EQUAL(ttl, 3);
}

// Sends a frame over the loopback device: its first byte behind the header is `what`.
static void send_frame(int s, int interface, char what) {
  struct sockaddr_ll to = {.sll_family = AF_PACKET, .sll_ifindex = interface, .sll_halen = 6};
  char frame[60] = {0};
  frame[12] = (char)0x88, frame[13] = (char)0xb5, frame[14] = what;
  EQUAL(sendto(s, frame, sizeof frame, 0, (void *)&to, sizeof to), sizeof frame);
}

// Whether an interface has been asked for what is sent to an address.
static int is_asked_for(const unsigned char *to) {
  char line[20];
  snprintf(line, sizeof line, "%02x%02x%02x%02x%02x%02x", to[0], to[1], to[2], to[3], to[4], to[5]);
  char *text = contents("/proc/net/dev_mcast", 0);
  int found = strstr(text, line) != 0;
  free(text);
  return found;
}

static void packets(void) {
  int s = socket(AF_PACKET, SOCK_RAW, 0), other = socket(AF_PACKET, SOCK_DGRAM | SOCK_CLOEXEC, 0), one = 1;
  if (s < 0 || other < 0)
    SKIP("no right to packet sockets");
  int interface = if_nametoindex("lo");
  struct sock_filter only_y[] = {{0x30, 0, 0, 14}, {0x15, 0, 1, 'y'}, {0x06, 0, 0, 0xffff}, {0x06, 0, 0, 0}};
  struct sock_fprog filter = {4, only_y};
  MUST(setsockopt(s, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0);
  MUST(setsockopt(s, SOL_SOCKET, SO_LOCK_FILTER, &one, sizeof one) == 0);
  MUST(setsockopt(s, SOL_PACKET, PACKET_AUXDATA, &one, sizeof one) == 0);
  uint64_t own = mix(seconds(CLOCK_REALTIME) * 1e6 + getpid()); // nobody else's
  struct packet_mreq group = {interface, PACKET_MR_MULTICAST, 6, {3, 0, own, own >> 8, own >> 16, own >> 24}};
  for (int i = 0; i < 2; i++)
    MUST(setsockopt(s, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &group, sizeof group) == 0);
  struct sockaddr_ll name = {.sll_family = AF_PACKET, .sll_protocol = htons(0x88b5), .sll_ifindex = interface}, seen = {0};
  if (bind(s, (void *)&name, sizeof name))
    SKIP("the loopback device is down");
  struct ifreq up = {.ifr_name = "lo"};
  if (ioctl(s, SIOCGIFFLAGS, &up) || !(up.ifr_flags & IFF_UP))
    SKIP("the loopback device is down");
  cut();
  socklen_t length = sizeof seen;
  EQUAL(getsockname(s, (void *)&seen, &length), 0);
  EQUAL(seen.sll_protocol, htons(0x88b5));
  EQUAL(seen.sll_ifindex, interface);
  length = sizeof seen;
  EQUAL(getsockname(other, (void *)&seen, &length), 0);
  EQUAL(seen.sll_protocol, 0);
  EQUAL(seen.sll_ifindex, 0);
  int on = 0;
  length = sizeof on;
  EQUAL(getsockopt(s, SOL_PACKET, PACKET_AUXDATA, &on, &length), 0);
  EQUAL(on, 1);
  EQUAL(setsockopt(s, SOL_SOCKET, SO_DETACH_FILTER, &on, sizeof on), -1);
  EQUAL(errno, EPERM);
  int raw = socket(AF_PACKET, SOCK_RAW, 0);
  send_frame(raw, interface, 'n');
  send_frame(raw, interface, 'y');
  char frame[100] = {0};
  EQUAL(recv(s, frame, sizeof frame, 0), 60);
  EQUAL(frame[14], 'y');
  for (int i = 0; i < 2; i++) { // it has asked twice
    CHECK(is_asked_for(group.mr_address));
    EQUAL(setsockopt(s, SOL_PACKET, PACKET_DROP_MEMBERSHIP, &group, sizeof group), 0);
  }
  CHECK(!is_asked_for(group.mr_address));
}

static void raw_and_netlink(void) {
  int ping = socket(AF_INET, SOCK_RAW, IPPROTO_ICMP), headers = socket(AF_INET, SOCK_RAW, IPPROTO_RAW), one = 1;
  int routes = socket(AF_NETLINK, SOCK_RAW, 0), strict = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 0);
  if (ping < 0 || headers < 0 || routes < 0)
    SKIP("no right to raw sockets");
  uint32_t filter = 0x5555aaaa, after = 0;
  MUST(setsockopt(ping, 255, 1, &filter, sizeof filter) == 0);
  MUST(setsockopt(strict, 270, 12, &one, sizeof one) == 0);
  struct { uint16_t family, pad; uint32_t port, groups; } name = {AF_NETLINK, 0, 0, 1}, seen;
  MUST(bind(routes, (void *)&name, sizeof name) == 0);
  int nexthops = 32 + 2; // RTNLGRP_… beyond the first 32
  setsockopt(routes, 270, 1, &nexthops, sizeof nexthops);
  socklen_t length = sizeof name;
  MUST(getsockname(routes, (void *)&name, &length) == 0);
  cut();
  length = sizeof after;
  EQUAL(getsockopt(ping, 255, 1, &after, &length), 0);
  EQUAL(after, filter);
  after = 0;
  EQUAL(getsockopt(headers, IPPROTO_IP, IP_HDRINCL, &after, &length), 0);
  EQUAL(after, 1);
  after = 0;
  EQUAL(getsockopt(strict, 270, 12, &after, &length), 0);
  EQUAL(after, 1);
  length = sizeof seen;
  EQUAL(getsockname(routes, (void *)&seen, &length), 0);
  EQUAL(seen.port, name.port);
  EQUAL(seen.groups, name.groups);
  struct { uint32_t length; uint16_t type, flags; uint32_t sequence, port; char body[16]; } ask = {32, 18, 0x301, 1, 0, {0}};
  char answer[8192];
  EQUAL(send(strict, &ask, 32, 0), 32);
  CHECK(recv(strict, answer, sizeof answer, 0) > 0);
}

// Sockets at addresses that are not the machine's, which they would not be allowed any more; and a filter on one of the kernel's.
static void foreign(void) {
  struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(7006)}, seen;
  struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(1024 + getpid() % 60000)}, seen6;
  char own[32]; // nobody else's
  snprintf(own, sizeof own, "192.0.2.%d", 1 + getpid() % 250);
  MUST(inet_pton(AF_INET, own, &four.sin_addr) == 1 && inet_pton(AF_INET6, "2001:db8::5", &six.sin6_addr) == 1);
  int doors[2] = {socket(AF_INET, SOCK_STREAM, 0), socket(AF_INET, SOCK_STREAM, 0)}, datagrams = socket(AF_INET6, SOCK_DGRAM, 0);
  int on = 1, off = 0, value;
  for (int i = 0; i < 2; i++) {
    MUST(!setsockopt(doors[i], IPPROTO_IP, IP_FREEBIND, &on, sizeof on));
    four.sin_port = htons(7006 + i);
    if (bind(doors[i], (void *)&four, sizeof four))
      SKIP("somebody else is at 192.0.2.0");
    MUST(!listen(doors[i], 3));
  }
  MUST(!setsockopt(doors[1], IPPROTO_IP, IP_FREEBIND, &off, sizeof off));
  if (datagrams >= 0) {
    MUST(!setsockopt(datagrams, IPPROTO_IP, IP_FREEBIND, &on, sizeof on));
    if (bind(datagrams, (void *)&six, sizeof six))
      SKIP("no IPv6 here");
    MUST(!setsockopt(datagrams, IPPROTO_IP, IP_FREEBIND, &off, sizeof off));
  }
  int routes = socket(AF_NETLINK, SOCK_RAW, 0);
  struct sock_filter nothing = {0x06, 0, 0, 0}, got[4];
  struct sock_fprog filter = {1, &nothing};
  MUST(!setsockopt(routes, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter));
  cut();
  socklen_t length;
  for (int i = 0; i < 2; i++) {
    length = sizeof seen;
    EQUAL(getsockname(doors[i], (void *)&seen, &length), 0);
    EQUAL(seen.sin_addr.s_addr, four.sin_addr.s_addr);
    EQUAL(ntohs(seen.sin_port), 7006 + i);
    length = sizeof value;
    EQUAL(getsockopt(doors[i], IPPROTO_IP, IP_FREEBIND, &value, &length), 0);
    EQUAL(value, !i);
    EQUAL(getsockopt(doors[i], SOL_SOCKET, SO_ACCEPTCONN, &value, &length), 0);
    EQUAL(value, 1);
  }
  if (datagrams >= 0) {
    length = sizeof seen6;
    EQUAL(getsockname(datagrams, (void *)&seen6, &length), 0);
    CHECK(!memcmp(&seen6.sin6_addr, &six.sin6_addr, sizeof six.sin6_addr));
    length = sizeof value;
    EQUAL(getsockopt(datagrams, IPPROTO_IP, IP_FREEBIND, &value, &length), 0);
    EQUAL(value, 0);
  }
  length = sizeof got / sizeof *got;
  EQUAL(getsockopt(routes, SOL_SOCKET, 26 /* SO_GET_FILTER */, got, &length), 0);
  EQUAL(length, 1);
  EQUAL(got[0].code, 0x06);
}

// --- for clients outside

static void serve(void) { // says back what it hears; how it is with its connections is for the clients to say
  int l = socket(AF_INET, SOCK_STREAM, 0), e = epoll_create1(0);
  address a = loopback(AF_INET, 0);
  MUST(bind(l, &a.any, size_of(&a)) == 0 && listen(l, 64) == 0);
  struct epoll_event event = {.events = EPOLLIN, .data.fd = l};
  MUST(epoll_ctl(e, EPOLL_CTL_ADD, l, &event) == 0);
  say("port %d", ntohs(name_of(l, 0).v4.sin_port));
  signal(SIGPIPE, SIG_IGN);
  ready();
  static char buffer[1 << 16];
  while (!gone()) {
    if (epoll_wait(e, &event, 1, 5) < 1)
      continue;
    int s = event.data.fd;
    if (s == l) {
      event.data.fd = accept(l, 0, 0);
      epoll_ctl(e, EPOLL_CTL_ADD, event.data.fd, &event);
      continue;
    }
    ssize_t n = read(s, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR)
      continue;
    for (ssize_t done = 0, m = 0; m >= 0 && done < n; done += m)
      m = write(s, buffer + done, n - done);
    if (n <= 0)
      close(s);
  }
}

static void idle_door(void) { // listens, and does not accept before it is told to go on
  int l = door(AF_INET, 0);
  say("port %d", ntohs(name_of(l, 0).v4.sin_port));
  cut();
  int s = accept(l, 0, 0);
  char c[5];
  CHECK(s >= 0);
  EQUAL(recv(s, c, 5, MSG_WAITALL), 5);
  EQUAL(write(s, c, 5), 5);
}

static int option_of(int s, int level, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  EQUAL(getsockopt(s, level, name, &value, &size), 0);
  return value;
}

static void multipath(void) { // sockets of Multipath TCP, to which others come by plain TCP
  int l = socket(AF_INET, SOCK_STREAM, 262), fresh = socket(AF_INET6, SOCK_STREAM, 262), on = 1;
  if (l < 0 || fresh < 0)
    SKIP("no Multipath TCP here");
  address a = loopback(AF_INET, 0);
  MUST(setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
  MUST(setsockopt(l, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
  MUST(bind(l, &a.any, size_of(&a)) == 0 && listen(l, 9) == 0);
  a = name_of(l, 0);
  cut();
  address b = name_of(l, 0);
  CHECK(!memcmp(&a, &b, size_of(&a)));
  EQUAL(option_of(l, SOL_SOCKET, SO_PROTOCOL), 262);
  EQUAL(option_of(fresh, SOL_SOCKET, SO_PROTOCOL), 262);
  EQUAL(option_of(l, SOL_SOCKET, SO_ACCEPTCONN), 1);
  EQUAL(option_of(l, SOL_SOCKET, SO_REUSEADDR), 1);
  EQUAL(option_of(l, IPPROTO_TCP, TCP_NODELAY), 1);
  int c = socket(AF_INET, SOCK_STREAM, 0);
  EQUAL(connect(c, &a.any, size_of(&a)), 0);
  int s = accept(l, 0, 0);
  char heard[5];
  EQUAL(write(c, "hello", 5), 5);
  EQUAL(recv(s, heard, 5, MSG_WAITALL), 5);
}

static address outside(int family) { // whose port is told in a file
  char text[16] = {0};
  int file = open(path_of(family == AF_INET ? "door4" : "door6"), O_RDONLY | O_CLOEXEC);
  MUST(file >= 0 && read(file, text, sizeof text - 1) > 0);
  close(file);
  address a = loopback(family, 0);
  *(family == AF_INET ? &a.v4.sin_port : &a.v6.sin6_port) = htons(atoi(text));
  return a;
}

static void speak(int s) { // it is connected
  char heard[5];
  EQUAL(send(s, "hello", 5, 0), 5);
  EQUAL(recv(s, heard, 5, MSG_WAITALL), 5);
  CHECK(memcmp(heard, "hello", 5) == 0);
}

static void *knock(void *unused) {
  address a = outside(AF_INET);
  int s = socket(AF_INET, SOCK_STREAM, 0);
  EQUAL(connect(s, &a.any, size_of(&a)), 0);
  speak(s);
  return unused;
}

static void knocks(void) { // it is being connected, where nobody opens
  int families[] = {AF_INET, AF_INET6}, s[2], e = epoll_create1(0);
  address names[2];
  for (int i = 0; i < 2; i++) {
    address a = outside(families[i]);
    int idle = 77 + i;
    s[i] = socket(families[i], SOCK_STREAM | SOCK_NONBLOCK, 0);
    MUST(setsockopt(s[i], IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle) == 0);
    MUST(connect(s[i], &a.any, size_of(&a)) == -1 && errno == EINPROGRESS);
    struct epoll_event event = {.events = EPOLLOUT, .data.u64 = i};
    MUST(epoll_ctl(e, EPOLL_CTL_ADD, s[i], &event) == 0);
    names[i] = name_of(s[i], 0);
  }
  pthread_t thread = spawn(knock, 0);
  nap(0.05);
  struct epoll_event event;
  MUST(epoll_wait(e, &event, 1, 0) == 0);
  cut();
  for (int left = 2; left > 0; left--) {
    MUST(epoll_wait(e, &event, 1, 30000) == 1);
    int i = event.data.u64, error = -1, idle = 0;
    socklen_t size = sizeof error;
    EQUAL(getsockopt(s[i], SOL_SOCKET, SO_ERROR, &error, &size), 0);
    EQUAL(error, 0);
    EQUAL(getsockopt(s[i], IPPROTO_TCP, TCP_KEEPIDLE, &idle, &size), 0);
    EQUAL(idle, 77 + i);
    address name = name_of(s[i], 0);
    CHECK(size_of(&name) == size_of(&names[i]) && !memcmp(&name, &names[i], size_of(&name)));
    EQUAL(fcntl(s[i], F_GETFL) & O_NONBLOCK, O_NONBLOCK);
    EQUAL(fcntl(s[i], F_SETFL, 0), 0);
    MUST(epoll_ctl(e, EPOLL_CTL_DEL, s[i], 0) == 0);
    speak(s[i]);
  }
  pthread_join(thread, 0);
}

SCENARIOS({"pair4", pair4}, {"pair6", pair6}, {"pair_mapped", pair_mapped}, {"two_families", two_families},
          {"no_door", no_door}, {"full", full}, {"half_closed", half_closed}, {"crowded", crowded}, {"other_end_closed", other_end_closed},
          {"with_options", with_options}, {"corked", corked}, {"watched", watched}, {"busy", busy},
          {"blocked", blocked}, {"many", many}, {"datagrams_unread", datagrams_unread},
          {"groups", groups}, {"without_port", without_port}, {"raw_and_netlink", raw_and_netlink}, {"packets", packets}, {"foreign", foreign}, {"serve", serve}, {"idle_door", idle_door}, {"knocks", knocks}, {"multipath", multipath})
