// Unix sockets with all that can be in their queues.
#include "target.h"
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <grp.h>
#include <linux/filter.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>

#define MOST 8

struct passed {
  char text[64];
  ssize_t length;
  int fds[MOST], count;
  struct ucred who;
  int told;
  struct sockaddr_un from;
  socklen_t from_length;
};

static void pass(int s, const void *data, size_t length, const int *fds, int count) {
  char control[CMSG_SPACE(MOST * sizeof(int))] = {0};
  struct iovec v = {(void *)data, length};
  struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
  if (count) {
    m.msg_control = control;
    m.msg_controllen = CMSG_SPACE(count * sizeof(int));
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(c), fds, count * sizeof(int));
  }
  MUST(sendmsg(s, &m, 0) == (ssize_t)length);
}

static struct passed take(int s, size_t most) {
  struct passed p = {.length = 0};
  char control[512] = {0};
  struct iovec v = {p.text, most};
  struct msghdr m = {.msg_name = &p.from, .msg_namelen = sizeof p.from, .msg_iov = &v, .msg_iovlen = 1,
                     .msg_control = control, .msg_controllen = sizeof control};
  p.length = recvmsg(s, &m, MSG_DONTWAIT);
  p.from_length = m.msg_namelen;
  for (struct cmsghdr *c = p.length < 0 ? 0 : CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
    if (c->cmsg_type == SCM_RIGHTS) {
      p.count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      memcpy(p.fds, CMSG_DATA(c), p.count * sizeof(int));
    } else if (c->cmsg_type == SCM_CREDENTIALS) {
      memcpy(&p.who, CMSG_DATA(c), sizeof p.who);
      p.told = 1;
    }
  }
  return p;
}

static void expect(struct passed p, const char *text, int count) {
  EQUAL(p.length, (ssize_t)strlen(text));
  if (p.length >= 0)
    CHECK(!memcmp(p.text, text, strlen(text)));
  EQUAL(p.count, count);
}

static struct sockaddr_un address_of(const char *name, socklen_t *length) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  if (*name == '@') {
    *length = 2 + 1 + snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "%s-%d", name + 1, getpid());
  } else {
    snprintf(a.sun_path, sizeof a.sun_path, "%s", name);
    *length = sizeof a;
  }
  return a;
}

static int bound(int kind, const char *name) {
  socklen_t length;
  struct sockaddr_un a = address_of(name, &length);
  int s = socket(AF_UNIX, kind, 0);
  MUST(s >= 0 && bind(s, (void *)&a, length) == 0);
  return s;
}

static int reach(int s, const char *name) {
  socklen_t length;
  struct sockaddr_un a = address_of(name, &length);
  return connect(s, (void *)&a, length);
}

static void in_flight(void) { // descriptors that are only in messages, and one that is in a table too
  int s[2], ends[2], file = open(path_of("flying"), O_RDWR | O_CREAT, 0600), event = eventfd(7, EFD_NONBLOCK);
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0 && pipe(ends) == 0);
  MUST(write(file, "0123456789", 10) == 10 && lseek(file, 4, SEEK_SET) == 4 && write(ends[1], "in the pipe", 11) == 11);
  MUST(flock(file, LOCK_EX) == 0);
  int kept = dup(file);
  pass(s[0], "first", 5, (int[]){file, ends[0]}, 2);
  pass(s[0], "2", 1, (int[]){ends[1], event, file}, 3);
  close(file);
  close(ends[0]);
  close(ends[1]);
  close(event);
  cut();
  struct passed p = take(s[1], 64), q = take(s[1], 64);
  expect(p, "first", 2);
  expect(q, "2", 3);
  char c[16] = {0};
  EQUAL(lseek(kept, 0, SEEK_CUR), 4);
  EQUAL(read(p.fds[0], c, 2), 2); // moves the common offset
  EQUAL(lseek(q.fds[2], 0, SEEK_CUR), 6);
  EQUAL(lseek(kept, 0, SEEK_CUR), 6);
  EQUAL(read(p.fds[1], c, 11), 11);
  CHECK(!memcmp(c, "in the pipe", 11));
  EQUAL(write(q.fds[0], "more", 4), 4);
  EQUAL(read(p.fds[1], c, 4), 4);
  uint64_t n = 0;
  EQUAL(read(q.fds[1], &n, 8), 8);
  EQUAL(n, 7);
  int other = open(path_of("flying"), O_RDWR);
  EQUAL(flock(other, LOCK_EX | LOCK_NB), -1);
}

static void watch_in_flight(void) { // an inotify that nobody has but a message
  int s[2], watch = inotify_init1(IN_NONBLOCK);
  MUST(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, s) == 0 && mkdir(path_of("watched"), 0700) == 0);
  MUST(inotify_add_watch(watch, path_of("watched"), IN_CREATE) == 1);
  pass(s[0], "w", 1, &watch, 1);
  close(watch);
  cut();
  struct passed p = take(s[1], 64);
  expect(p, "w", 1);
  char c[512];
  EQUAL(read(p.fds[0], c, sizeof c), -1);
  close(open(path_of("watched/new"), O_CREAT | O_RDWR, 0600));
  CHECK(read(p.fds[0], c, sizeof c) > 0);
}

static void nested(void) { // a socket in a message, with a socket in a message in its queue
  int a[2], b[2], c[2];
  MUST(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, a) == 0 && socketpair(AF_UNIX, SOCK_DGRAM, 0, b) == 0);
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, c) == 0 && write(c[0], "deep", 4) == 4);
  pass(b[0], "", 0, &c[1], 1);
  pass(b[0], "after", 5, 0, 0);
  pass(a[0], "outer", 5, &b[1], 1);
  close(b[1]);
  close(c[1]);
  cut();
  struct passed p = take(a[1], 64);
  expect(p, "outer", 1);
  struct passed q = take(p.fds[0], 64);
  expect(q, "", 1);
  expect(take(p.fds[0], 64), "after", 0);
  expect(take(q.fds[0], 64), "deep", 0);
  EQUAL(write(b[0], "x", 1), 1);
  expect(take(p.fds[0], 64), "x", 0);
}

static void left_behind(void) { // by an end that is closed
  int s[2], file = open(path_of("left"), O_RDWR | O_CREAT, 0600);
  MUST(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, s) == 0 && write(file, "left", 4) == 4);
  pass(s[0], "one", 3, &file, 1);
  pass(s[0], "two", 3, 0, 0);
  close(s[0]);
  close(file);
  cut();
  struct passed p = take(s[1], 64);
  expect(p, "one", 1);
  char c[4];
  EQUAL(pread(p.fds[0], c, 4, 0), 4);
  expect(take(s[1], 64), "two", 0);
  EQUAL(recv(s[1], c, 4, 0), 0); // the end
}

static void credentials(void) {
  int s[2], d[2], one = 1, zero = 0;
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0 && socketpair(AF_UNIX, SOCK_DGRAM, 0, d) == 0);
  MUST(send(s[0], "before", 6, 0) == 6); // nobody asked yet
  MUST(setsockopt(s[1], SOL_SOCKET, SO_PASSCRED, &one, sizeof one) == 0);
  MUST(setsockopt(d[1], SOL_SOCKET, SO_PASSCRED, &one, sizeof one) == 0);
  MUST(send(s[0], "after", 5, 0) == 5 && send(d[0], "", 0, 0) == 0);
  pass(d[0], "both", 4, &s[0], 1);
  cut();
  struct passed p = take(s[1], 64), q = take(s[1], 64);
  expect(p, "before", 0);
  EQUAL(p.told, 1);
  EQUAL(p.who.pid, 0);
  EQUAL((int)p.who.uid, 65534);
  expect(q, "after", 0);
  EQUAL(q.who.pid, getpid());
  EQUAL(q.who.uid, getuid());
  EQUAL(q.who.gid, getgid());
  p = take(d[1], 64);
  expect(p, "", 0);
  EQUAL(p.who.pid, getpid());
  q = take(d[1], 64);
  expect(q, "both", 1);
  EQUAL(q.who.pid, getpid());
  socklen_t length = sizeof zero;
  EQUAL(getsockopt(s[1], SOL_SOCKET, SO_PASSCRED, &zero, &length), 0);
  EQUAL(zero, 1);
  EQUAL(send(s[0], "new", 3, 0), 3);
  EQUAL(take(s[1], 64).who.pid, getpid());
}

static void from(struct passed p, const char *name) {
  socklen_t length;
  struct sockaddr_un a = address_of(name, &length);
  EQUAL(p.from_length, *name ? length : 0);
  if (*name)
    CHECK(!memcmp(&p.from, &a, length));
}

static void senders(void) { // of datagrams: here, gone, nameless
  char path[108];
  snprintf(path, sizeof path, "%s/r", directory);
  int r = bound(SOCK_DGRAM, path), a = bound(SOCK_DGRAM, "@stillpoint-a"), n = socket(AF_UNIX, SOCK_DGRAM, 0);
  int g = bound(SOCK_DGRAM, "@stillpoint-gone");
  MUST(reach(a, path) == 0 && reach(n, path) == 0 && reach(g, path) == 0);
  pass(a, "from a", 6, &n, 1);
  pass(n, "nameless", 8, 0, 0);
  pass(g, "from the gone", 13, 0, 0);
  pass(a, "", 0, 0, 0);
  close(g);
  cut();
  struct passed p = take(r, 64);
  expect(p, "from a", 1);
  from(p, "@stillpoint-a");
  p = take(r, 64);
  expect(p, "nameless", 0);
  from(p, "");
  p = take(r, 64);
  expect(p, "from the gone", 0);
  from(p, "@stillpoint-gone");
  p = take(r, 64);
  expect(p, "", 0);
  from(p, "@stillpoint-a");
  EQUAL(send(n, "again", 5, 0), 5); // it is connected by the name, still
  expect(take(r, 64), "again", 0);
}

static void mutual(void) { // two bound datagram sockets, connected to each other
  int a = bound(SOCK_DGRAM, "@stillpoint-l"), b = bound(SOCK_DGRAM, "@stillpoint-r");
  MUST(reach(a, "@stillpoint-r") == 0 && reach(b, "@stillpoint-l") == 0);
  MUST(send(a, "to b", 4, 0) == 4 && send(b, "to a", 4, 0) == 4);
  cut();
  struct passed p = take(b, 64);
  expect(p, "to b", 0);
  from(p, "@stillpoint-l");
  p = take(a, 64);
  expect(p, "to a", 0);
  from(p, "@stillpoint-r");
  EQUAL(send(a, "new", 3, 0), 3);
  expect(take(b, 64), "new", 0);
}

static void clients(void) { // that were made before the server they send to
  int c = socket(AF_UNIX, SOCK_DGRAM, 0);
  MUST(chdir(directory) == 0);
  int server = bound(SOCK_DGRAM, "server"); // and do so by a relative name
  MUST(reach(c, "server") == 0);
  cut();
  EQUAL(send(c, "found", 5, 0), 5);
  expect(take(server, 64), "found", 0);
}

static void pending(void) { // connections that were not yet accepted
  char path[108];
  snprintf(path, sizeof path, "%s/p", directory);
  int l = bound(SOCK_STREAM | SOCK_NONBLOCK, path), c[3], m = bound(SOCK_SEQPACKET, "@stillpoint-p");
  MUST(listen(l, 5) == 0 && listen(m, 1) == 0);
  for (int i = 0; i < 3; i++)
    MUST((c[i] = socket(AF_UNIX, SOCK_STREAM, 0)) >= 0 && reach(c[i], path) == 0);
  MUST(shutdown(c[1], SHUT_WR) == 0);
  int d = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
  MUST(reach(d, "@stillpoint-p") == 0);
  cut();
  EQUAL(write(c[2], "third", 5), 5);
  EQUAL(write(c[0], "first", 5), 5);
  int a[3];
  for (int i = 0; i < 3; i++)
    CHECK((a[i] = accept(l, 0, 0)) >= 0);
  EQUAL(accept(l, 0, 0), -1);
  expect(take(a[0], 64), "first", 0);
  expect(take(a[1], 64), "", 0); // its end
  expect(take(a[2], 64), "third", 0);
  EQUAL(write(a[1], "back", 4), 4);
  expect(take(c[1], 64), "back", 0);
  int e = accept(m, 0, 0);
  EQUAL(write(e, "packet", 6), 6);
  expect(take(d, 64), "packet", 0);
  EQUAL(fcntl(d, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
  EQUAL(fcntl(c[0], F_GETFL) & O_NONBLOCK, 0);
}

static void listener_closed(void) { // after it accepted: one by an abstract name, one by a path, one by a path that is gone
  char paths[3][108] = {"@stillpoint-closed"};
  int c[3], a[3];
  snprintf(paths[1], sizeof paths[1], "%s/stale", directory);
  snprintf(paths[2], sizeof paths[2], "%s/gone", directory);
  for (int i = 0; i < 3; i++) {
    int l = bound(SOCK_STREAM, paths[i]);
    MUST(listen(l, 1) == 0 && (c[i] = socket(AF_UNIX, SOCK_STREAM, 0)) >= 0 && reach(c[i], paths[i]) == 0);
    MUST((a[i] = accept(l, 0, 0)) >= 0 && write(c[i], "hello", 5) == 5);
    close(l);
  }
  MUST(unlink(paths[2]) == 0);
  cut();
  for (int i = 0; i < 3; i++) {
    expect(take(a[i], 64), "hello", 0);
    socklen_t length = sizeof(struct sockaddr_un), known;
    struct sockaddr_un name, wanted = address_of(paths[i], &known);
    EQUAL(getpeername(c[i], (void *)&name, &length), 0);
    CHECK(!memcmp(&name, &wanted, i ? 2 + strlen(paths[i]) : known));
    EQUAL(write(a[i], "back", 4), 4);
    expect(take(c[i], 64), "back", 0);
  }
  EQUAL(access(paths[1], F_OK), 0);
  EQUAL(access(paths[2], F_OK), -1);
}

static void renamed(void) { // bound to a name of its own, which then takes the place of the one to be reached by
  char first[108], door[108];
  snprintf(first, sizeof first, "%s/door.1.tmp", directory);
  snprintf(door, sizeof door, "%s/door", directory);
  int l = bound(SOCK_STREAM, first), d, before, a;
  MUST(listen(l, 3) == 0 && chmod(first, 0621) == 0 && rename(first, door) == 0);
  MUST((before = socket(AF_UNIX, SOCK_STREAM, 0)) >= 0 && reach(before, door) == 0 && (a = accept(l, 0, 0)) >= 0);
  snprintf(first, sizeof first, "%s/letters.tmp", directory);
  MUST((d = bound(SOCK_DGRAM, first)) >= 0);
  snprintf(door, sizeof door, "%s/letters", directory);
  MUST(rename(first, door) == 0);
  int sender = socket(AF_UNIX, SOCK_DGRAM, 0);
  MUST(reach(sender, door) == 0 && write(sender, "unread", 6) == 6);
  cut();
  char text[20];
  EQUAL(read(d, text, sizeof text), 6);
  EQUAL(write(sender, "more", 4), 4);
  EQUAL(read(d, text, sizeof text), 4);
  int other = socket(AF_UNIX, SOCK_DGRAM, 0);
  EQUAL(reach(other, door), 0);
  EQUAL(write(other, "others", 6), 6);
  EQUAL(read(d, text, sizeof text), 6);
  EQUAL(access(first, F_OK), -1);
  EQUAL(write(before, "on", 2), 2);
  EQUAL(read(a, text, sizeof text), 2);
  snprintf(first, sizeof first, "%s/door.1.tmp", directory);
  snprintf(door, sizeof door, "%s/door", directory);
  struct stat s;
  EQUAL(access(first, F_OK), -1);
  EQUAL(stat(door, &s), 0);
  EQUAL(s.st_mode & 0777, 0621);
  int c = socket(AF_UNIX, SOCK_STREAM, 0), b;
  EQUAL(reach(c, door), 0);
  CHECK((b = accept(l, 0, 0)) >= 0);
  int names[] = {l, a, b};
  for (int i = 0; i < 3; i++) {
    socklen_t length = sizeof(struct sockaddr_un), known;
    struct sockaddr_un name, wanted = address_of(first, &known);
    EQUAL(getsockname(names[i], (void *)&name, &length), 0);
    CHECK(!memcmp(&name, &wanted, 2 + strlen(first)));
  }
}

static void directory_gone(void) { // with the names in it: of who listens, of a connection, of who is sent datagrams
  char inner[100], outer[100], path[3][108];
  snprintf(outer, sizeof outer, "%s/outer", directory);
  snprintf(inner, sizeof inner, "%s/inner", outer);
  MUST(mkdir(outer, 0700) == 0 && mkdir(inner, 0700) == 0);
  for (int i = 0; i < 3; i++)
    snprintf(path[i], sizeof path[i], "%s/%d", i == 2 ? outer : inner, i);
  int l = bound(SOCK_STREAM, path[0]), k = bound(SOCK_STREAM, path[1]), d = bound(SOCK_DGRAM, path[2]);
  int c[2], a[2];
  MUST(listen(l, 1) == 0 && (c[0] = socket(AF_UNIX, SOCK_STREAM, 0)) >= 0 && reach(c[0], path[0]) == 0);
  MUST(listen(k, 1) == 0 && (c[1] = socket(AF_UNIX, SOCK_STREAM, 0)) >= 0 && reach(c[1], path[1]) == 0);
  MUST((a[0] = accept(l, 0, 0)) >= 0 && (a[1] = accept(k, 0, 0)) >= 0 && close(k) == 0);
  for (int i = 0; i < 3; i++)
    MUST(unlink(path[i]) == 0);
  MUST(rmdir(inner) == 0 && rmdir(outer) == 0);
  cut();
  EQUAL(access(outer, F_OK), -1);
  int names[] = {l, a[1], d};
  for (int i = 0; i < 3; i++) {
    socklen_t length = sizeof(struct sockaddr_un), known;
    struct sockaddr_un name, wanted = address_of(path[i], &known);
    EQUAL(getsockname(names[i], (void *)&name, &length), 0);
    CHECK(!memcmp(&name, &wanted, 2 + strlen(path[i])));
  }
  for (int i = 0; i < 2; i++) {
    EQUAL(write(c[i], "on", 2), 2);
    expect(take(a[i], 64), "on", 0);
  }
  EQUAL(reach(socket(AF_UNIX, SOCK_STREAM, 0), path[0]), -1);
}

static void peek_offset(void) {
  int s[2], at = 3;
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0 && write(s[0], "peeking", 7) == 7);
  MUST(setsockopt(s[1], SOL_SOCKET, SO_PEEK_OFF, &at, sizeof at) == 0);
  cut();
  char c[8] = {0};
  EQUAL(recv(s[1], c, 2, MSG_PEEK), 2);
  CHECK(!memcmp(c, "ki", 2));
  EQUAL(recv(s[1], c, 7, 0), 7);
}

static void half_closed(void) { // with what was sent before
  int s[2], t[2], file = open("/dev/null", O_RDONLY);
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, t) == 0);
  pass(s[0], "last", 4, &file, 1);
  MUST(shutdown(s[0], SHUT_WR) == 0);
  pass(t[0], "kept", 4, &file, 1);
  MUST(shutdown(t[1], SHUT_RD) == 0);
  close(file);
  cut();
  expect(take(s[1], 64), "last", 1);
  expect(take(s[1], 64), "", 0);
  EQUAL(send(s[0], "no", 2, MSG_NOSIGNAL), -1);
  EQUAL(send(s[1], "yes", 3, 0), 3);
  expect(take(s[0], 64), "yes", 0);
  EQUAL(send(t[0], "no", 2, MSG_NOSIGNAL), -1);
  EQUAL(send(t[1], "yes", 3, 0), 3);
}

// How a new socket fares that is to reach a name, and to send there; 0: well.
static int failure_at(const char *name, int kind) {
  int s = socket(AF_UNIX, kind | SOCK_CLOEXEC, 0);
  int failure = reach(s, name) || send(s, "x", 1, MSG_NOSIGNAL) != 1 ? errno : 0;
  close(s);
  return failure;
}

static int polled(int fd) {
  struct pollfd p = {fd, POLLIN | POLLRDHUP, 0};
  MUST(poll(&p, 1, 0) >= 0);
  return p.revents;
}

static void shut_alone(void) { // halves of sockets without a connection, and what was sent before
  int door = bound(SOCK_STREAM, "@stillpoint-door"), idle = bound(SOCK_STREAM, "@stillpoint-idle");
  int box = bound(SOCK_DGRAM, "@stillpoint-box"), open_box = bound(SOCK_DGRAM, "@stillpoint-open-box");
  int sender = socket(AF_UNIX, SOCK_DGRAM, 0), silent = socket(AF_UNIX, SOCK_STREAM, 0);
  MUST(!listen(door, 3) && !failure_at("@stillpoint-box", SOCK_DGRAM));
  MUST(!shutdown(door, SHUT_RD) && !shutdown(idle, SHUT_RD) && !shutdown(box, SHUT_RD));
  MUST(!shutdown(sender, SHUT_WR) && !shutdown(silent, SHUT_WR));
  int all[] = {door, idle, box, sender, silent}, then[COUNT(all)];
  for (size_t i = 0; i < COUNT(all); i++)
    then[i] = polled(all[i]);
  cut();
  for (size_t i = 0; i < COUNT(all); i++)
    EQUAL(polled(all[i]), then[i]);
  EQUAL(failure_at("@stillpoint-door", SOCK_STREAM), ECONNREFUSED);
  EQUAL(failure_at("@stillpoint-box", SOCK_DGRAM), EPIPE);
  char byte = 0;
  EQUAL(read(box, &byte, 1), 1);
  EQUAL(byte, 'x');
  EQUAL(reach(sender, "@stillpoint-open-box"), 0);
  EQUAL(send(sender, "x", 1, MSG_NOSIGNAL), -1);
  EQUAL(errno, EPIPE);
  EQUAL(failure_at("@stillpoint-open-box", SOCK_DGRAM), 0);
  EQUAL(read(open_box, &byte, 1), 1);
}

static void listening(void) { // to strangers
  char path[108];
  snprintf(path, sizeof path, "%s/door", directory);
  int l = bound(SOCK_STREAM, path);
  MUST(listen(l, 3) == 0);
  cut();
  int a = accept(l, 0, 0);
  CHECK(a >= 0);
  EQUAL(write(a, "welcome", 7), 7);
}

static void empty_inside(void) { // a message that shows to those who peek only once
  int s[2];
  MUST(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, s) == 0);
  pass(s[0], "one", 3, 0, 0);
  pass(s[0], "", 0, 0, 0);
  pass(s[0], "three", 5, 0, 0);
  cut();
  expect(take(s[1], 64), "one", 0);
  expect(take(s[1], 64), "", 0);
  expect(take(s[1], 64), "three", 0);
}

static void logging(void) { // to a socket outside, by its name
  char path[108];
  snprintf(path, sizeof path, "%s/log", directory);
  int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  MUST(reach(s, path) == 0 && send(s, "before", 6, 0) == 6);
  cut();
  EQUAL(send(s, "after", 5, 0), 5);
}

// Sockets that are connected to nobody: new, with a name, to itself; and an epoll that is in nothing but a message.
static void by_itself(void) {
  struct sockaddr_un name = {.sun_family = AF_UNIX}, self = name;
  snprintf(name.sun_path, sizeof name.sun_path, "%s", path_of("named"));
  snprintf(self.sun_path, sizeof self.sun_path, "%s", path_of("self"));
  int fresh = socket(AF_UNIX, SOCK_SEQPACKET, 0), named = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  int own = socket(AF_UNIX, SOCK_DGRAM, 0);
  MUST(fresh >= 0 && !bind(named, (void *)&name, sizeof name));
  MUST(!bind(own, (void *)&self, sizeof self) && !connect(own, (void *)&self, sizeof self));
  // By a name that is relative to where it was.
  struct sockaddr_un near = {.sun_family = AF_UNIX, .sun_path = "near"}, now;
  socklen_t length = sizeof now;
  int nearby = socket(AF_UNIX, SOCK_DGRAM, 0), to_it = socket(AF_UNIX, SOCK_DGRAM, 0);
  MUST(!chdir(directory) && !bind(nearby, (void *)&near, sizeof near) && !connect(to_it, (void *)&near, sizeof near));
  MUST(!chdir("/"));
  // Whom it sends to has no name any more.
  struct sockaddr_un gone = {.sun_family = AF_UNIX};
  snprintf(gone.sun_path, sizeof gone.sun_path, "%s", path_of("gone"));
  int nameless = socket(AF_UNIX, SOCK_DGRAM, 0), sender = socket(AF_UNIX, SOCK_DGRAM, 0);
  MUST(!bind(nameless, (void *)&gone, sizeof gone) && !connect(sender, (void *)&gone, sizeof gone));
  MUST(!unlink(gone.sun_path));
  cut();
  EQUAL(listen(named, 5), 0);
  EQUAL(connect(fresh, (void *)&name, sizeof name), 0);
  int accepted = accept(named, 0, 0);
  EQUAL(send(fresh, "hello", 5, 0), 5);
  char got[16] = {0};
  EQUAL(recv(accepted, got, sizeof got, 0), 5);
  EQUAL(send(own, "to itself", 9, 0), 9);
  EQUAL(recv(own, got, sizeof got, MSG_DONTWAIT), 9);
  CHECK(!strcmp(got, "to itself"));
  EQUAL(send(to_it, "near", 4, 0), 4);
  EQUAL(recv(nearby, got, sizeof got, MSG_DONTWAIT), 4);
  EQUAL(getsockname(nearby, (void *)&now, &length), 0);
  CHECK(!strcmp(now.sun_path, "near"));
  EQUAL(send(sender, "anyway", 6, 0), 6);
  EQUAL(recv(nameless, got, sizeof got, MSG_DONTWAIT), 6);
  EQUAL(access(gone.sun_path, F_OK), -1);
}

// Whom a socket tells of at its other end: process, user, group, groups.
struct known {
  struct ucred who;
  gid_t groups[300];
  int count;
};

static struct known known(int s) {
  struct known k = {.count = 0};
  socklen_t length = sizeof k.who;
  EQUAL(getsockopt(s, SOL_SOCKET, SO_PEERCRED, &k.who, &length), 0);
  length = sizeof k.groups;
  k.count = getsockopt(s, SOL_SOCKET, 59 /* SO_PEERGROUPS */, k.groups, &length) ? -errno : (int)(length / sizeof(gid_t));
  return k;
}

static void same(struct known then, struct known now) {
  EQUAL((int)now.who.uid, (int)then.who.uid);
  EQUAL((int)now.who.gid, (int)then.who.gid);
  EQUAL(now.count, then.count);
  if (then.count > 0 && now.count == then.count)
    CHECK(!memcmp(now.groups, then.groups, then.count * sizeof(gid_t)));
}

// As another user, of so many groups, and then as before. Threads are none, so that this is the whole program.
static void be(int uid, int gid, int groups) {
  gid_t all[300];
  for (int i = 0; i < groups; i++)
    all[i] = 4000 + i;
  MUST(!seteuid(0) && !setgroups(groups, all) && !setegid(gid) && !seteuid(uid));
}

#define PEERS 14
static void peers(void) { // of other users: pairs, connections, those who listen
  if (getuid()) { // who cannot be anybody else
    cut();
    return;
  }
  gid_t before[300];
  int count = getgroups(300, before), s[PEERS], l[3], pair[2];
  gid_t group = getegid();
  char path[108];
  snprintf(path, sizeof path, "%s/peers", directory);
  const char *names[] = {path, "@stillpoint-peers", "@stillpoint-closed-peers"};
  MUST(!chmod(directory, 0777));
  for (int i = 0; i < 3; i++) {
    l[i] = bound(i == 1 ? SOCK_SEQPACKET : SOCK_STREAM, names[i]);
    be(2000 + i, 2100 + i, i * 40);
    MUST(!listen(l[i], 5));
    be(0, 0, 0);
  }
  MUST(!chmod(path, 0777));
  for (int i = 0; i < 3; i++) {
    MUST((s[i] = socket(AF_UNIX, i == 1 ? SOCK_SEQPACKET : SOCK_STREAM, 0)) >= 0);
    be(3000 + i, 3100 + i, 100 * i);
    MUST(!reach(s[i], names[i]));
    be(0, 0, 0);
    MUST((s[3 + i] = accept(l[i], 0, 0)) >= 0);
  }
  MUST(!close(l[2])); // the others go on to listen
  s[6] = l[0], s[7] = l[1];
  int kinds[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
  for (int i = 0; i < 3; i++) {
    be(1001 + i, 1101 + i, 1 + i);
    MUST(!socketpair(AF_UNIX, kinds[i], 0, pair));
    be(0, 0, 0);
    MUST(write(pair[1], "unread", 6) == 6);
    s[8 + i] = pair[0];
    if (i != 1)
      s[11 + i / 2] = pair[1];
    else
      close(pair[1]);
  }
  // Two that tell of nobody.
  int a = bound(SOCK_DGRAM, "@stillpoint-nobody"), b = bound(SOCK_DGRAM, "@stillpoint-no-one");
  MUST(!reach(a, "@stillpoint-no-one") && !reach(b, "@stillpoint-nobody"));
  s[13] = a;
  MUST(!setgroups(count, before) && !setegid(group));
  struct known then[PEERS];
  for (int i = 0; i < PEERS; i++)
    then[i] = known(s[i]);
  EQUAL((int)then[4].who.uid, 3001);
  EQUAL(then[5].count, 200);
  EQUAL((int)then[6].who.uid, 2000);
  EQUAL((int)then[9].who.gid, 1102);
  EQUAL((int)then[13].who.uid, -1);
  cut();
  for (int i = 0; i < PEERS; i++)
    same(then[i], known(s[i]));
  // Who connects from now on is told of who listens.
  int c[2];
  for (int i = 0; i < 2; i++) {
    MUST((c[i] = socket(AF_UNIX, i ? SOCK_SEQPACKET : SOCK_STREAM, 0)) >= 0);
    EQUAL(reach(c[i], names[i]), 0);
    same(then[6 + i], known(c[i]));
  }
  for (int i = 0; i < 3; i++)
    expect(take(s[8 + i], 64), "unread", 0);
  EQUAL(send(b, "to a", 4, 0), 4);
  expect(take(a, 64), "to a", 0);
}

static void pending_peers(void) { // of which the other side is told when it accepts
  if (getuid()) {
    cut();
    return;
  }
  int l = bound(SOCK_STREAM, "@stillpoint-waiting"), ours, go[2], back[2];
  MUST(!listen(l, 5) && !pipe(go) && !pipe(back));
  pid_t child = fork();
  MUST(child >= 0);
  if (!child) {
    close(l);
    gid_t groups[70];
    for (int i = 0; i < 70; i++)
      groups[i] = 5000 + i;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int length = 3 + snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "stillpoint-waiting-%d", getppid());
    MUST(!setgroups(70, groups) && !setresgid(1234, 1234, 1234) && !setresuid(1235, 1235, 1235));
    int c = socket(AF_UNIX, SOCK_STREAM, 0);
    MUST(!connect(c, (void *)&a, length));
    MUST(write(back[1], "", 1) == 1 && read(go[0], &length, 1) == 1);
    _exit(known(c).who.uid ? 1 : 0); // the one who listens is root
  }
  char byte;
  MUST(read(back[0], &byte, 1) == 1);
  MUST((ours = socket(AF_UNIX, SOCK_STREAM, 0)) >= 0 && !reach(ours, "@stillpoint-waiting"));
  // From now on those who come are told of somebody else.
  be(1300, 1301, 2);
  MUST(!listen(l, 4));
  be(0, 0, 0);
  struct known then[] = {known(ours), known(l)};
  cut();
  same(then[0], known(ours));
  same(then[1], known(l));
  int first = accept(l, 0, 0), second = accept(l, 0, 0);
  struct known now = known(first);
  EQUAL((int)now.who.uid, 1235);
  EQUAL((int)now.who.gid, 1234);
  EQUAL(now.count, 70);
  EQUAL((int)known(second).who.uid, 0);
  EQUAL(write(go[1], "", 1), 1);
  int status = -1;
  EQUAL(waitpid(child, &status, 0), child);
  EQUAL(status, 0);
}

static void nameless(void) { // with unread datagrams, and with connections that wait, when their names are gone
  char path[2][108];
  for (int i = 0; i < 2; i++)
    snprintf(path[i], sizeof path[i], "%s/nameless-%d", directory, i);
  int d = bound(SOCK_DGRAM, path[0]), l = bound(SOCK_STREAM, path[1]), s = socket(AF_UNIX, SOCK_DGRAM, 0), c[2];
  MUST(!reach(s, path[0]) && send(s, "unread", 6, 0) == 6 && !listen(l, 2));
  pass(s, "with this", 9, &l, 1);
  for (int i = 0; i < 2; i++)
    MUST((c[i] = socket(AF_UNIX, SOCK_STREAM, 0)) >= 0 && !reach(c[i], path[1]));
  MUST(!unlink(path[0]) && !unlink(path[1]));
  cut();
  expect(take(d, 64), "unread", 0);
  expect(take(d, 64), "with this", 1);
  EQUAL(send(s, "more", 4, 0), 4);
  expect(take(d, 64), "more", 0);
  for (int i = 0; i < 2; i++) {
    int a = accept(l, 0, 0);
    EQUAL(write(c[i], "hello", 5), 5);
    expect(take(a, 64), "hello", 0);
    EQUAL(access(path[i], F_OK), -1);
  }
}

// Whose process a message has a handle to.
static int sent_by(int s, const char *text) {
  char data[64], control[256], line[64], info[512] = {0};
  struct iovec v = {data, sizeof data};
  struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  EQUAL(recvmsg(s, &m, MSG_DONTWAIT), (ssize_t)strlen(text));
  CHECK(!memcmp(data, text, strlen(text)));
  for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
    if (c->cmsg_type == 4) { // SCM_PIDFD
      int fd, file;
      memcpy(&fd, CMSG_DATA(c), sizeof fd);
      snprintf(line, sizeof line, "/proc/self/fdinfo/%d", fd);
      file = open(line, O_RDONLY);
      ssize_t n = read(file, info, sizeof info - 1);
      close(file);
      close(fd);
      const char *pid = n > 0 ? strstr(info, "Pid:") : 0;
      return pid ? atoi(pid + 4) : -1;
    }
  return 0;
}

static void handles(void) { // of who sent a message, and security labels, where there are any
  int one = 1, s[2], d[2], *pairs[] = {s, d};
  MUST(!socketpair(AF_UNIX, SOCK_STREAM, 0, s) && !socketpair(AF_UNIX, SOCK_DGRAM, 0, d));
  for (int i = 0; i < 2; i++) {
    MUST(!setsockopt(pairs[i][1], SOL_SOCKET, SO_PASSCRED, &one, sizeof one));
    MUST(!setsockopt(pairs[i][1], SOL_SOCKET, SO_PASSSEC, &one, sizeof one));
    if (setsockopt(pairs[i][1], SOL_SOCKET, 76 /* SO_PASSPIDFD */, &one, sizeof one))
      MUST(errno == ENOPROTOOPT);
    MUST(send(pairs[i][0], "unread", 6, 0) == 6);
  }
  int can = getsockopt(s[1], SOL_SOCKET, 76, &one, &(socklen_t){sizeof one}) == 0;
  cut();
  for (int i = 0; i < 2; i++) {
    EQUAL(sent_by(pairs[i][1], "unread"), can ? getpid() : 0);
    EQUAL(send(pairs[i][0], "new", 3, 0), 3);
    EQUAL(sent_by(pairs[i][1], "new"), can ? getpid() : 0);
  }
}

static void filters(void) { // that let nothing pass that begins with 'n', when the queue has it already
  struct sock_filter code[] = {BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 0), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 'n', 0, 1),
                               BPF_STMT(BPF_RET | BPF_K, 0), BPF_STMT(BPF_RET | BPF_K, ~0u)};
  struct sock_fprog program = {COUNT(code), code};
  int one = 1, s[2], d[2];
  MUST(!socketpair(AF_UNIX, SOCK_DGRAM, 0, s) && !socketpair(AF_UNIX, SOCK_SEQPACKET, 0, d));
  int r = bound(SOCK_DGRAM, "@stillpoint-filtered"), from = socket(AF_UNIX, SOCK_DGRAM, 0);
  MUST(!reach(from, "@stillpoint-filtered"));
  // In both directions, with nothing beside them and with something.
  int ends[] = {s[0], s[1], d[0], d[1], r}, others[] = {s[1], s[0], d[1], d[0], from};
  for (int i = 0; i < 5; i++) {
    if (i < 2)
      pass(others[i], "not yet", 7, &one, 0);
    else
      pass(others[i], "not yet", 7, &r, 1);
  }
  for (int i = 0; i < 5; i++) {
    MUST(!setsockopt(ends[i], SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program));
    MUST(!setsockopt(ends[i], SOL_SOCKET, SO_LOCK_FILTER, &one, sizeof one));
    send(others[i], "never", 5, MSG_DONTWAIT);
    MUST(send(others[i], "passes", 6, 0) == 6);
  }
  cut();
  for (int i = 0; i < 5; i++) {
    expect(take(ends[i], 64), "not yet", i > 1);
    expect(take(ends[i], 64), "passes", 0);
    send(others[i], "no more", 7, MSG_DONTWAIT);
    EQUAL(send(others[i], "more", 4, 0), 4);
    expect(take(ends[i], 64), "more", 0);
  }
}

// Each of a pair lies in the queues of both, so that nobody can close them but the kernel when it looks for such.
static void each_other(void) {
  int pair[2];
  MUST(!socketpair(AF_UNIX, SOCK_DGRAM, 0, pair));
  for (int i = 0; i < 2; i++) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "each-other-%d-%d", getpid(), i);
    MUST(!bind(pair[i], (void *)&name, offsetof(struct sockaddr_un, sun_path) + 1 + length));
  }
  char byte = 'z', control[CMSG_SPACE(sizeof(int))] = {0};
  struct iovec one = {&byte, 1};
  struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  struct cmsghdr *head = CMSG_FIRSTHDR(&message);
  *head = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
  for (int i = 0; i < 4; i++) {
    memcpy(CMSG_DATA(head), &pair[i % 2], sizeof(int));
    EQUAL(sendmsg(pair[i / 2], &message, 0), 1);
  }
  cut();
  for (int i = 0; i < 4; i++) {
    message.msg_controllen = sizeof control;
    EQUAL(recvmsg(pair[i / 2], &message, MSG_DONTWAIT), 1);
    int got;
    memcpy(&got, CMSG_DATA(head), sizeof got);
    struct stat a, b;
    MUST(!fstat(got, &a) && !fstat(pair[i % 2], &b));
    EQUAL(a.st_ino, b.st_ino);
    close(got);
  }
}

SCENARIOS({"in_flight", in_flight}, {"each_other", each_other}, {"by_itself", by_itself}, {"watch_in_flight", watch_in_flight}, {"nested", nested}, {"left_behind", left_behind}, {"credentials", credentials},
          {"senders", senders}, {"mutual", mutual}, {"clients", clients}, {"pending", pending},
          {"listener_closed", listener_closed}, {"directory_gone", directory_gone}, {"renamed", renamed}, {"peek_offset", peek_offset}, {"half_closed", half_closed},
          {"logging", logging}, {"listening", listening}, {"shut_alone", shut_alone}, {"peers", peers}, {"pending_peers", pending_peers}, {"nameless", nameless}, {"handles", handles}, {"filters", filters}, {"empty_inside", empty_inside})
