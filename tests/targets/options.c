// All that can be asked of a socket: whatever can be set is, and whatever can be read is compared afterwards, also what nobody has
// thought of.
#include "target.h"
#include <linux/netlink.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#define NAMES 128
#define LONGEST 64

static const int levels[] = {SOL_SOCKET, 0, 6, 17, 41, 58, 255, 263, 270, 273, 284};
#define LEVELS (int)(sizeof levels / sizeof *levels)

struct value {
  int length; // -1: there is none
  unsigned char bytes[LONGEST];
};

struct kept {
  const char *what;
  int fd;
  struct value all[sizeof levels / sizeof *levels][NAMES];
};

struct name {
  int level, name;
};

// What the kernel counts or tells of the moment, and what takes more than a number.
static const struct name passing[] = {
    {SOL_SOCKET, SO_ERROR},     {SOL_SOCKET, SO_INCOMING_CPU}, {SOL_SOCKET, 55 /* SO_MEMINFO */},
    {SOL_SOCKET, 56 /* SO_INCOMING_NAPI_ID */}, {SOL_SOCKET, 57 /* SO_COOKIE */}, {SOL_SOCKET, 77 /* SO_PEERPIDFD */},
    {6, TCP_INFO},              {6, TCP_QUICKACK},             {6, 26 /* TCP_CC_INFO */},
    {6, 24 /* TCP_TIMESTAMP */}, {263, 6 /* PACKET_STATISTICS */}};

// Filters, bindings, keys, joins, namespaces, tables of the firewall, other families, repair, rings: each has its own tests, or none
// can be had for a socket that is to be used.
static const struct name not_set[] = {
    {SOL_SOCKET, SO_ATTACH_FILTER}, {SOL_SOCKET, SO_DETACH_FILTER}, {SOL_SOCKET, SO_LOCK_FILTER}, {SOL_SOCKET, SO_ATTACH_BPF},
    {SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF}, {SOL_SOCKET, SO_ATTACH_REUSEPORT_EBPF}, {SOL_SOCKET, 68}, {SOL_SOCKET, 78},
    {SOL_SOCKET, 79}, {SOL_SOCKET, 72 /* SO_BUF_LOCK: a size that is set is locked */}, {SOL_SOCKET, 80}, {0, 16}, {0, 17}, {0, 32}, {0, 35}, {0, 36}, {0, 37}, {0, 38}, {0, 39}, {0, 40}, {0, 41},
    {0, 42}, {0, 43}, {0, 44}, {0, 45}, {0, 46}, {0, 47}, {0, 48}, {41, 1}, {41, 6}, {41, 9}, {41, 20}, {41, 21}, {41, 22}, {41, 27}, {41, 28},
    {41, 34}, {41, 35}, {41, 42}, {41, 43}, {41, 44}, {41, 45}, {41, 46}, {41, 47}, {41, 48}, {41, 50}, {6, 14}, {6, 19}, {6, 20}, {6, 21}, {6, 22}, {6, 29},
    {6, 31}, {6, 32}, {6, 33}, {6, 38}, {6, 39}, {6, 40}, {6, 41}, {6, 42}, {6, 43}, {17, 100}, {263, 5}, {263, 13}, {263, 18}, {270, 1}, {270, 2},
    {270, 6}, {270, 7}};

static int among(const struct name *names, size_t bytes, int level, int name) {
  for (size_t i = 0; i < bytes / sizeof *names; i++)
    if (names[i].level == level && names[i].name == name)
      return 1;
  return 0;
}

static struct value value_of(int fd, int level, int name) {
  struct value v = {.length = -1};
  socklen_t length = sizeof v.bytes;
  if (!getsockopt(fd, level, name, v.bytes, &length))
    v.length = (int)length;
  return v;
}

static int is_same(const struct value *a, const struct value *b) {
  return a->length == b->length && (a->length <= 0 || !memcmp(a->bytes, b->bytes, a->length));
}

// Sets an option to something that it was not, if there is anything.
static void set_otherwise(int fd, int level, int name) {
  struct value before = value_of(fd, level, name);
  if (before.length <= 0 || among(not_set, sizeof not_set, level, name) || among(passing, sizeof passing, level, name))
    return;
  int now = before.bytes[0];
  int others[] = {!now, 2, 3, 7, 64, 1000, 100000, now + 1};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    setsockopt(fd, level, name, &others[i], sizeof others[i]);
    struct value after = value_of(fd, level, name);
    if (!is_same(&before, &after))
      return;
  }
}

static void read_all(struct kept *kept) {
  for (int l = 0; l < LEVELS; l++)
    for (int name = 0; name < NAMES; name++)
      kept->all[l][name] = value_of(kept->fd, levels[l], name);
}

// Whoever made a pair of sockets is told as their peer: after a restore that is the command, of the same user.
static void forget_maker(struct value *v) {
  if (v->length > 4)
    memset(v->bytes, 0, 4);
}

static void compare(struct kept *kept) {
  for (int l = 0; l < LEVELS; l++)
    for (int name = 0; name < NAMES; name++) {
      struct value *then = &kept->all[l][name], now = value_of(kept->fd, levels[l], name);
      if (levels[l] == SOL_SOCKET && name == SO_PEERCRED)
        forget_maker(then), forget_maker(&now);
      if (is_same(then, &now) || among(passing, sizeof passing, levels[l], name))
        continue;
      int was = 0, is = 0;
      memcpy(&was, then->bytes, 4);
      memcpy(&is, now.bytes, 4);
      say("%s: level %d, option %d: %d bytes, %#x, then %d bytes, %#x", kept->what, levels[l], name, then->length, was, now.length, is);
      CHECK(!"an option kept");
    }
}

static int listening(int family) {
  int fd = socket(family, SOCK_STREAM, 0);
  struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
  struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (fd >= 0 && (family == AF_INET ? bind(fd, (void *)&four, sizeof four) : bind(fd, (void *)&any, sizeof any)) == 0)
    listen(fd, 5);
  return fd;
}

static void every_option(void) {
  int pairs[3][2] = {{-1, -1}, {-1, -1}, {-1, -1}};
  static const int kinds[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
  for (int i = 0; i < 3; i++)
    MUST(!socketpair(AF_UNIX, kinds[i], 0, pairs[i]));
  static struct kept all[20];
  int count = 0;
#define KEEP(name, opened) all[count].what = name, all[count++].fd = opened
  KEEP("TCP", socket(AF_INET, SOCK_STREAM, 0));
  KEEP("TCP6", socket(AF_INET6, SOCK_STREAM, 0));
  KEEP("TCP that listens", listening(AF_INET));
  KEEP("TCP6 that listens", listening(AF_INET6));
  KEEP("UDP", socket(AF_INET, SOCK_DGRAM, 0));
  KEEP("UDP6", socket(AF_INET6, SOCK_DGRAM, 0));
  KEEP("raw", socket(AF_INET, SOCK_RAW, 89));
  KEEP("raw UDP", socket(AF_INET, SOCK_RAW, IPPROTO_UDP));
  KEEP("raw ICMP", socket(AF_INET, SOCK_RAW, IPPROTO_ICMP));
  KEEP("raw6", socket(AF_INET6, SOCK_RAW, 89));
  KEEP("raw6 ICMP", socket(AF_INET6, SOCK_RAW, IPPROTO_ICMPV6));
  KEEP("netlink", socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
  KEEP("packet", socket(AF_PACKET, SOCK_DGRAM, 0));
  for (int i = 0; i < 3; i++)
    KEEP("unix", pairs[i][0]);
  for (int i = 0; i < count; i++)
    for (int l = 0; l < LEVELS && all[i].fd >= 0; l++)
      for (int name = 0; name < NAMES; name++)
        set_otherwise(all[i].fd, levels[l], name);
  // Some change others.
  for (int i = 0; i < count; i++)
    read_all(&all[i]);
  cut();
  for (int i = 0; i < count; i++)
    compare(&all[i]);
}

static void expect_number(int fd, int name, int value) {
  EQUAL(*(int *)value_of(fd, SOL_SOCKET, name).bytes, value);
}

// Time stamps, in both forms, and of a connection by number; the processor that packets are to come by, of whom has no connection.
static void stamps_and_processors(void) {
  enum { STAMPS = 1 << 1 | 1 << 4, NUMBERED = STAMPS | 1 << 7, NEW = 65 };
  int stamps = STAMPS, numbered = NUMBERED, processor = 0;
  int server = listening(AF_INET), client = socket(AF_INET, SOCK_STREAM, 0), udp = socket(AF_INET, SOCK_DGRAM, 0), newer = socket(AF_INET, SOCK_DGRAM, 0);
  struct sockaddr_in address;
  socklen_t length = sizeof address;
  MUST(!getsockname(server, (void *)&address, &length) && !connect(client, (void *)&address, length));
  int accepted = accept(server, 0, 0);
  MUST(accepted >= 0 && !setsockopt(client, SOL_SOCKET, SO_TIMESTAMPING, &numbered, 4));
  MUST(!setsockopt(udp, SOL_SOCKET, SO_TIMESTAMPING, &stamps, 4) && !setsockopt(newer, SOL_SOCKET, NEW, &numbered, 4));
  MUST(!setsockopt(server, SOL_SOCKET, SO_INCOMING_CPU, &processor, 4) && !setsockopt(udp, SOL_SOCKET, SO_INCOMING_CPU, &processor, 4));
  cut();
  expect_number(client, SO_TIMESTAMPING, NUMBERED);
  expect_number(client, NEW, 0);
  expect_number(udp, SO_TIMESTAMPING, STAMPS);
  expect_number(udp, NEW, 0);
  expect_number(newer, NEW, NUMBERED);
  expect_number(server, SO_INCOMING_CPU, 0);
  expect_number(udp, SO_INCOMING_CPU, 0);
  char byte;
  EQUAL(write(client, "x", 1), 1);
  EQUAL(read(accepted, &byte, 1), 1);
}

// What takes more than a number: sizes that were set, and are the kernel's again to change, keys, and times to send at.
static void sizes_and_keys(void) {
  enum { BUFFER_LOCK = 72, TXTIME = 61, KEY = 33 };
  struct { int clock; unsigned flags; } txtime = {CLOCK_MONOTONIC, 2};
  int size = 30000, none = 0, pair[2], udp = socket(AF_INET, SOCK_DGRAM, 0), server = listening(AF_INET);
  unsigned char key[16];
  for (int i = 0; i < 16; i++)
    key[i] = i * 7;
  MUST(!socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) && udp >= 0 && server >= 0);
  int all[] = {udp, pair[0]};
  for (size_t i = 0; i < COUNT(all); i++) {
    MUST(!setsockopt(all[i], SOL_SOCKET, SO_RCVBUF, &size, sizeof size) && !setsockopt(all[i], SOL_SOCKET, SO_SNDBUF, &size, sizeof size));
    if (setsockopt(all[i], SOL_SOCKET, BUFFER_LOCK, &none, sizeof none))
      SKIP("no SO_BUF_LOCK here");
  }
  MUST(!setsockopt(udp, SOL_SOCKET, TXTIME, &txtime, sizeof txtime) && !setsockopt(server, IPPROTO_TCP, KEY, key, sizeof key));
  cut();
  for (size_t i = 0; i < COUNT(all); i++) {
    expect_number(all[i], SO_RCVBUF, 2 * size);
    expect_number(all[i], SO_SNDBUF, 2 * size);
    expect_number(all[i], BUFFER_LOCK, 0);
  }
  struct value v = value_of(udp, SOL_SOCKET, TXTIME);
  EQUAL(v.length, sizeof txtime);
  CHECK(!memcmp(v.bytes, &txtime, sizeof txtime));
  v = value_of(server, IPPROTO_TCP, KEY);
  EQUAL(v.length, sizeof key);
  CHECK(!memcmp(v.bytes, key, sizeof key));
}

SCENARIOS({"every_option", every_option}, {"sizes_and_keys", sizes_and_keys}, {"stamps_and_processors", stamps_and_processors})
