// Descriptors: each kind of open file, what it refers to, what is queued in it, what it is shared with.
#include "target.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/fanotify.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <termios.h>

#define OFFSET(fd) lseek(fd, 0, SEEK_CUR)

static int create(const char *name, int flags, const char *text) {
  int fd = open(path_of(name), O_CREAT | O_TRUNC | flags, 0640);
  MUST(fd >= 0);
  MUST(write(fd, text, strlen(text)) == (ssize_t)strlen(text) || (flags & O_ACCMODE) == O_RDONLY);
  return fd;
}

static int same_description(int a, int b) { // KCMP_FILE
  long r = syscall(SYS_kcmp, getpid(), getpid(), 0, a, b);
  if (r < 0) { // not in this kernel: try with the offset
    off_t at = OFFSET(a);
    lseek(a, at + 1, SEEK_SET);
    r = OFFSET(b) != at + 1;
    lseek(a, at, SEEK_SET);
  }
  return r == 0;
}

static char *read_all(const char *name) {
  return contents(path_of(name), 0);
}

static void regular(void) {
  int w = create("w", O_WRONLY, "0123456789"), rw = create("rw", O_RDWR, "abcdefghij");
  int app = create("app", O_WRONLY | O_APPEND, "head"), r = open(path_of("rw"), O_RDONLY | O_CLOEXEC);
  int sync = open(path_of("w"), O_RDWR | O_DSYNC | O_NONBLOCK | O_NOATIME);
  MUST(r >= 0 && sync >= 0);
  lseek(w, 4, SEEK_SET);
  lseek(rw, 7, SEEK_SET);
  lseek(r, 2, SEEK_SET);
  int high = fcntl(r, F_DUPFD, 800);
  MUST(high == 800);
  int flags[5], fds[5] = {w, rw, app, r, sync};
  for (int i = 0; i < 5; i++)
    flags[i] = fcntl(fds[i], F_GETFL);
  cut();
  for (int i = 0; i < 5; i++)
    EQUAL(fcntl(fds[i], F_GETFL), flags[i]);
  EQUAL(fcntl(r, F_GETFD), FD_CLOEXEC);
  EQUAL(fcntl(high, F_GETFD), 0);
  EQUAL(fcntl(w, F_GETFD), 0);
  EQUAL(OFFSET(w), 4);
  EQUAL(OFFSET(rw), 7);
  EQUAL(OFFSET(r), 2);
  CHECK(same_description(r, high));
  CHECK(!same_description(r, rw));
  char c[4] = {0};
  EQUAL(read(rw, c, 3), 3);
  CHECK(!memcmp(c, "hij", 3));
  EQUAL(write(w, "W", 1), 1);
  EQUAL(write(app, "tail", 4), 4);
  CHECK(!strcmp(read_all("w"), "0123W56789"));
  CHECK(!strcmp(read_all("app"), "headtail"));
  EQUAL(fcntl(high + 1, F_GETFD), -1);
}

static void duplicates(void) {
  int a = create("d", O_RDWR, "0123456789"), b = dup(a), c = open(path_of("d"), O_RDWR);
  int d = fcntl(a, F_DUPFD_CLOEXEC, 100);
  lseek(a, 3, SEEK_SET);
  cut();
  EQUAL(OFFSET(b), 3);
  EQUAL(OFFSET(c), 0);
  lseek(b, 5, SEEK_SET);
  EQUAL(OFFSET(a), 5);
  EQUAL(OFFSET(d), 5);
  EQUAL(OFFSET(c), 0);
  CHECK(same_description(a, d));
  CHECK(!same_description(a, c));
  EQUAL(fcntl(d, F_GETFD), FD_CLOEXEC);
}

static void deleted(void) { // an open file without a name
  int fd = create("gone", O_RDWR, "");
  char *big = malloc(300000);
  fill(big, 300000, 9);
  MUST(write(fd, big, 300000) == 300000);
  int second = open(path_of("gone"), O_RDONLY), has_attributes = !fsetxattr(fd, "user.kept", "value", 5, 0);
  MUST(unlink(path_of("gone")) == 0);
  lseek(fd, 1000, SEEK_SET);
  int hidden = open(directory, O_TMPFILE | O_RDWR, 0600);
  MUST(hidden >= 0 && write(hidden, "hidden", 6) == 6);
  int twins[2]; // of one name, opened as shm_open(3) does
  for (int i = 0; i < 2; i++) {
    twins[i] = open(path_of("twin"), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
    MUST(twins[i] >= 0 && write(twins[i], &i, sizeof i) == sizeof i && unlink(path_of("twin")) == 0);
  }
  cut();
  for (int i = 0; i < 2; i++) {
    int which = -1;
    EQUAL(pread(twins[i], &which, sizeof which, 0), sizeof which);
    EQUAL(which, i);
    EQUAL(!!(fcntl(twins[i], F_GETFL) & O_NOFOLLOW), 1);
  }
  char *back = malloc(300000);
  EQUAL(pread(fd, back, 300000, 0), 300000);
  CHECK(!memcmp(back, big, 300000));
  EQUAL(OFFSET(fd), 1000);
  struct stat s, t;
  fstat(fd, &s);
  fstat(second, &t);
  EQUAL(s.st_nlink, 0);
  EQUAL(s.st_size, 300000);
  EQUAL(s.st_ino, t.st_ino); // both see one file
  EQUAL(s.st_mode & 07777, 0640);
  CHECK(access(path_of("gone"), F_OK) != 0);
  EQUAL(pwrite(fd, "!", 1, 7), 1);
  EQUAL(pread(second, back, 1, 7), 1);
  EQUAL(back[0], '!');
  if (has_attributes) {
    EQUAL(fgetxattr(second, "user.kept", back, 100), 5);
    CHECK(!memcmp(back, "value", 5));
  }
  EQUAL(pread(hidden, back, 6, 0), 6);
  CHECK(!memcmp(back, "hidden", 6));
  EQUAL(write(hidden, "+", 1), 1);
  EQUAL(OFFSET(hidden), 7);
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", hidden);
  EQUAL(linkat(AT_FDCWD, link, AT_FDCWD, path_of("shown"), AT_SYMLINK_FOLLOW), 0);
  EQUAL(access(path_of("shown"), F_OK), 0);
}

// When memory and files without names were read and written.
static void times(void) {
  int fds[4], handle = -1;
  for (int i = 0; i < 2; i++) {
    fds[i] = syscall(SYS_memfd_create, "timed", 0);
    MUST(fds[i] >= 0 && ftruncate(fds[i], 4 * PAGE) == 0);
  }
  fds[2] = create("timed", O_RDWR, "of another time");
  fds[3] = open(directory, O_TMPFILE | O_RDWR, 0600);
  MUST(fds[3] >= 0 && ftruncate(fds[2], PAGE) == 0 && unlink(path_of("timed")) == 0);
  char *p = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
  char *q = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[2], 0);
  char *r = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  MUST(p != MAP_FAILED && q != MAP_FAILED && r != MAP_FAILED);
  fill(p, 3 * PAGE, 4);
  fill(q, PAGE, 5);
  fill(r, PAGE, 6);
  char link[96];
  snprintf(link, sizeof link, "/proc/self/map_files/%lx-%lx", (long)r, (long)r + PAGE);
  handle = open(link, O_RDWR); // for the privileged
  int all[] = {fds[0], fds[1], fds[2], fds[3], handle};
  for (size_t i = 0; i < COUNT(all); i++) {
    struct timespec times[2] = {{1000 + i, 5}, {i == 1 ? -7 : 2000 + (time_t)i, 999999999}};
    MUST(all[i] < 0 || futimens(all[i], times) == 0);
  }
  cut();
  for (size_t i = 0; i < COUNT(all); i++) {
    struct stat s;
    if (all[i] < 0)
      continue;
    EQUAL(fstat(all[i], &s), 0);
    EQUAL(s.st_atim.tv_sec, 1000 + i);
    EQUAL(s.st_atim.tv_nsec, 5);
    EQUAL(s.st_mtim.tv_sec, i == 1 ? -7 : 2000 + (time_t)i);
    EQUAL(s.st_mtim.tv_nsec, 999999999);
  }
  CHECK(filled(p, 3 * PAGE, 4) && filled(q, PAGE, 5) && filled(r, PAGE, 6));
}

static void directories(void) {
  mkdir(path_of("many"), 0700);
  for (int i = 0; i < 50; i++) {
    char name[32];
    snprintf(name, sizeof name, "many/%d", i);
    close(create(name, O_WRONLY, ""));
  }
  DIR *d = opendir(path_of("many"));
  MUST(d);
  int plain = open(path_of("many"), O_RDONLY | O_DIRECTORY), seen = 0;
  int handle = open(path_of("many"), O_PATH), file = open(path_of("many/7"), O_PATH);
  // Read some raw entries with a small buffer so that the kernel's position is in the middle.
  char buffer[400];
  long n = syscall(SYS_getdents64, plain, buffer, sizeof buffer);
  MUST(n > 0);
  for (long at = 0; at < n; at += *(uint16_t *)(buffer + at + 16))
    seen++;
  cut();
  while ((n = syscall(SYS_getdents64, plain, buffer, sizeof buffer)) > 0)
    for (long at = 0; at < n; at += *(uint16_t *)(buffer + at + 16))
      seen++;
  EQUAL(seen, 52);
  seen = 0;
  while (readdir(d))
    seen++;
  EQUAL(seen, 52);
  EQUAL(faccessat(handle, "49", F_OK, 0), 0);
  CHECK(fcntl(handle, F_GETFL) & O_PATH);
  EQUAL(read(file, buffer, 1), -1);
  EQUAL(errno, EBADF);
  struct stat s;
  EQUAL(fstat(file, &s), 0);
  int real = openat(plain, "7", O_RDONLY);
  CHECK(real >= 0);
}

// --- pipes and FIFOs

static void pipes(void) {
  int a[2], b[2], packets[2], empty[2], half[2];
  MUST(pipe(a) == 0 && pipe2(b, O_NONBLOCK | O_CLOEXEC) == 0 && pipe2(packets, O_DIRECT) == 0 && pipe(empty) == 0);
  MUST(pipe(half) == 0);
  char *data = malloc(200000), *back = malloc(200000);
  fill(data, 200000, 5);
  MUST(fcntl(a[1], F_SETPIPE_SZ, 262144) == 262144);
  MUST(write(a[1], data, 200000) == 200000);
  while (write(b[1], data, PAGE) > 0) // full
    ;
  MUST(write(packets[1], "one", 3) == 3 && write(packets[1], "three", 5) == 5);
  MUST(write(half[1], "rest", 4) == 4);
  close(half[1]); // no writer: after the data comes the end
  int second = dup(a[0]);
  cut();
  EQUAL(fcntl(a[1], F_GETPIPE_SZ), 262144);
  int waiting = 0;
  EQUAL(ioctl(a[0], FIONREAD, &waiting), 0);
  EQUAL(waiting, 200000);
  EQUAL(read(second, back, 100000), 100000);
  size_t got = 100000;
  while (got < 200000) {
    ssize_t n = read(a[0], back + got, 200000 - got);
    CHECK(n > 0);
    if (n <= 0)
      break;
    got += n;
  }
  CHECK(!memcmp(data, back, 200000));
  EQUAL(write(b[1], "x", 1), -1);
  EQUAL(errno, EAGAIN);
  EQUAL(fcntl(b[0], F_GETFD), FD_CLOEXEC);
  CHECK(fcntl(b[0], F_GETFL) & O_NONBLOCK);
  size_t total = 0;
  ssize_t n;
  while ((n = read(b[0], back, 512)) > 0) {
    CHECK(!memcmp(back, data + total % PAGE, n));
    total += n;
  }
  EQUAL(total, 65536);
  EQUAL(errno, EAGAIN);
  EQUAL(read(packets[0], back, 100), 3);
  EQUAL(read(packets[0], back, 100), 5);
  EQUAL(read(half[0], back, 100), 4);
  EQUAL(read(half[0], back, 100), 0);
  EQUAL(write(empty[1], "e", 1), 1);
  EQUAL(read(empty[0], back, 10), 1);
}

// Packets beside what is in none, and in pipes that are in another mode by now: what is read ends with a packet, and what of that does not
// fit is lost.
static void pipes_of_two_modes(void) {
  static const struct {
    int packets[3], now;
    const char *parts[3];
  } all[] = {{{1, 0}, 0, {"ab", "cdef"}}, {{0}, 1, {"abcdef"}}, {{1}, 0, {"alone"}}, {{1, 1, 0}, 1, {"one", "two", "three"}}};
  int ends[COUNT(all)][2], behind[2];
  for (size_t i = 0; i < COUNT(all); i++) {
    MUST(pipe2(ends[i], O_NONBLOCK) == 0);
    for (int part = 0; part < 3 && all[i].parts[part]; part++) {
      size_t length = strlen(all[i].parts[part]);
      MUST(fcntl(ends[i][1], F_SETFL, O_NONBLOCK | (all[i].packets[part] ? O_DIRECT : 0)) == 0);
      MUST(write(ends[i][1], all[i].parts[part], length) == (ssize_t)length);
    }
    MUST(fcntl(ends[i][1], F_SETFL, O_NONBLOCK | (all[i].now ? O_DIRECT : 0)) == 0);
  }
  // What a page is full of is apart from packets, also when most of it was read.
  char page[PAGE];
  memset(page, 'p', sizeof page);
  MUST(pipe2(behind, O_NONBLOCK) == 0 && write(behind[1], page, PAGE) == PAGE && fcntl(behind[1], F_SETFL, O_NONBLOCK | O_DIRECT) == 0);
  MUST(write(behind[1], "AAAA", 4) == 4 && write(behind[1], "BBBB", 4) == 4 && read(behind[0], page, PAGE - 6) == PAGE - 6);
  cut();
  char back[64];
  EQUAL(read(behind[0], back, sizeof back), 10);
  CHECK(!memcmp(back, "ppppppAAAA", 10));
  EQUAL(read(behind[0], back, 2), 2);
  CHECK(!memcmp(back, "BB", 2));
  EQUAL(read(behind[0], back, 2), -1);
  for (size_t i = 0; i < COUNT(all); i++) {
    CHECK(!(fcntl(ends[i][1], F_GETFL) & O_DIRECT) == !all[i].now);
    for (int part = 0; part < 3 && all[i].parts[part]; part++) {
      size_t length = all[i].packets[part] ? 2 : strlen(all[i].parts[part]);
      EQUAL(read(ends[i][0], back, length), length);
      CHECK(!memcmp(back, all[i].parts[part], length));
    }
    EQUAL(read(ends[i][0], back, 1), -1);
    EQUAL(errno, EAGAIN);
  }
}

// Whose pipes and sockets are: that decides who may open them again, and which sockets may share an address.
static void owners(void) {
  int p[2], pair[2], udp = socket(AF_INET, SOCK_DGRAM, 0), listener = socket(AF_UNIX, SOCK_STREAM, 0);
  MUST(pipe(p) == 0 && socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0 && udp >= 0 && listener >= 0);
  struct sockaddr_un name = {.sun_family = AF_UNIX};
  MUST(bind(listener, (void *)&name, sizeof name.sun_family) == 0 && listen(listener, 3) == 0);
  int all[] = {p[0], pair[1], udp, listener};
  struct stat then[COUNT(all) + 2], now;
  for (size_t i = 0; i < COUNT(all); i++) {
    struct timespec times[2] = {{1000 + i, 5}, {2000 + i, 6}};
    MUST(geteuid() || fchown(all[i], 11 + i, 21 + i) == 0);
    MUST(fchmod(all[i], 0640 + i) == 0 && futimens(all[i], times) == 0 && fstat(all[i], &then[i]) == 0);
  }
  MUST(fstat(p[1], &then[4]) == 0 && fstat(pair[0], &then[5]) == 0);
  cut();
  int after[] = {p[0], pair[1], udp, listener, p[1], pair[0]};
  for (size_t i = 0; i < COUNT(after); i++) {
    EQUAL(fstat(after[i], &now), 0);
    EQUAL(now.st_uid, then[i].st_uid);
    EQUAL(now.st_gid, then[i].st_gid);
    EQUAL(now.st_mode, then[i].st_mode);
    EQUAL(now.st_atim.tv_sec, then[i].st_atim.tv_sec);
    EQUAL(now.st_atim.tv_nsec, then[i].st_atim.tv_nsec);
    EQUAL(now.st_mtim.tv_sec, then[i].st_mtim.tv_sec);
    EQUAL(now.st_mtim.tv_nsec, then[i].st_mtim.tv_nsec);
  }
}

static void fifo(void) {
  MUST(mkfifo(path_of("fifo"), 0600) == 0);
  int rw = open(path_of("fifo"), O_RDWR), r = open(path_of("fifo"), O_RDONLY | O_NONBLOCK);
  int w = open(path_of("fifo"), O_WRONLY | O_APPEND);
  MUST(rw >= 0 && r >= 0 && w >= 0);
  MUST(write(w, "queued", 6) == 6);
  cut();
  char c[16] = {0};
  EQUAL(read(r, c, 3), 3);
  EQUAL(read(rw, c + 3, 10), 3);
  CHECK(!strcmp(c, "queued"));
  EQUAL(read(r, c, 1), -1);
  EQUAL(errno, EAGAIN);
  int again = open(path_of("fifo"), O_WRONLY | O_NONBLOCK); // still the FIFO of that name
  CHECK(again >= 0);
  EQUAL(write(again, "new", 3), 3);
  EQUAL(read(r, c, 10), 3);
}

// A FIFO that nobody finds by its name any more, with others of that name.
static void fifo_removed(void) {
  int r[2], w[2];
  struct timespec times[2] = {{1000, 5}, {2000, 6}};
  for (int i = 0; i < 2; i++) {
    MUST(mkfifo(path_of("fifo"), 0640) == 0);
    r[i] = open(path_of("fifo"), O_RDONLY | O_NONBLOCK);
    w[i] = open(path_of("fifo"), O_WRONLY);
    MUST(r[i] >= 0 && w[i] >= 0 && write(w[i], &i, sizeof i) == sizeof i && unlink(path_of("fifo")) == 0);
    MUST(futimens(r[i], times) == 0);
  }
  mkdir(path_of("below"), 0700);
  MUST(mkfifo(path_of("below/fifo"), 0600) == 0);
  int handle = open(path_of("below/fifo"), O_PATH);
  MUST(handle >= 0 && unlink(path_of("below/fifo")) == 0 && rmdir(path_of("below")) == 0);
  cut();
  for (int i = 0; i < 2; i++) {
    int which = -1;
    struct stat s, t;
    EQUAL(fstat(r[i], &s), 0);
    EQUAL(fstat(w[i], &t), 0);
    EQUAL(s.st_ino, t.st_ino);
    EQUAL(s.st_nlink, 0);
    EQUAL(s.st_mode, S_IFIFO | 0640);
    EQUAL(s.st_atim.tv_sec, 1000);
    EQUAL(s.st_mtim.tv_sec, 2000);
    char name[64], link[4096] = {0}, wanted[4200];
    snprintf(name, sizeof name, "/proc/self/fd/%d", w[i]);
    snprintf(wanted, sizeof wanted, "%s (deleted)", path_of("fifo"));
    MUST(readlink(name, link, sizeof link - 1) > 0);
    CHECK(!strcmp(link, wanted));
    int again = open(name, O_WRONLY | O_NONBLOCK);
    CHECK(again >= 0);
    EQUAL(read(r[i], &which, sizeof which), sizeof which);
    EQUAL(which, i);
    EQUAL(write(again, "more", 4), 4);
    EQUAL(read(r[i], &which, sizeof which), 4);
  }
  CHECK(access(path_of("fifo"), F_OK) != 0);
  struct stat s;
  EQUAL(fstat(handle, &s), 0);
  EQUAL(s.st_mode, S_IFIFO | 0600);
  EQUAL(s.st_nlink, 0);
}

static int told(int fd) {
  struct pollfd p = {fd, POLLIN | POLLOUT, 0};
  MUST(poll(&p, 1, 0) >= 0);
  return p.revents;
}

// Readers whose writers have left are told so, and those that never had one are not.
static void fifo_left(void) {
  static const char *const names[] = {"left", "laden", "lonely", "unread"};
  int early[4], late[4], wanted[9], pipe_ends[2], *all[] = {early, late};
  for (int i = 0; i < 4; i++) {
    MUST(mkfifo(path_of(names[i]), 0600) == 0);
    early[i] = open(path_of(names[i]), O_RDONLY | O_NONBLOCK);
    MUST(early[i] >= 0);
    if (i == 2)
      late[i] = dup(early[i]);
    else if (i == 3) { // writers, whose reader leaves
      late[i] = open(path_of(names[i]), O_WRONLY);
      close(early[i]);
      early[i] = dup(late[i]);
    } else {
      int w = open(path_of(names[i]), O_WRONLY);
      MUST(w >= 0 && (i == 0 || write(w, "data", 4) == 4));
      close(w);
      late[i] = open(path_of(names[i]), O_RDONLY | O_NONBLOCK);
    }
    MUST(late[i] >= 0);
  }
  MUST(pipe(pipe_ends) == 0);
  close(pipe_ends[1]);
  for (int i = 0; i < 8; i++)
    wanted[i] = told(all[i / 4][i % 4]);
  wanted[8] = told(pipe_ends[0]);
  MUST(wanted[0] == POLLHUP && wanted[1] == (POLLHUP | POLLIN) && wanted[2] == 0 && wanted[4] == 0);
  MUST(wanted[5] == POLLIN && wanted[8] == POLLHUP);
  cut();
  for (int i = 0; i < 8; i++)
    EQUAL(told(all[i / 4][i % 4]), wanted[i]);
  EQUAL(told(pipe_ends[0]), wanted[8]);
  for (int i = 0; i < 3; i++) {
    int w = open(path_of(names[i]), O_WRONLY | O_NONBLOCK);
    CHECK(w >= 0);
    close(w);
    EQUAL(told(early[i]) & POLLHUP, POLLHUP);
    EQUAL(told(late[i]) & POLLHUP, POLLHUP);
  }
}

// --- sockets

// A FIFO that others may have open, too.
static void fifo_in_common(void) {
  MUST(mkfifo(path_of("fifo"), 0600) == 0);
  int both = open(path_of("fifo"), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  MUST(both >= 0);
  cut();
  char data[8];
  EQUAL(read(both, data, sizeof data), -1);
  EQUAL(errno, EAGAIN);
  EQUAL(write(both, "again", 5), 5);
  EQUAL(read(both, data, sizeof data), 5);
  CHECK(memcmp(data, "again", 5) == 0);
}

static void stream_pair(void) {
  int s[2];
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0);
  char *data = malloc(50000), *back = malloc(50000);
  fill(data, 50000, 6);
  MUST(write(s[0], data, 50000) == 50000);
  MUST(write(s[1], "other way", 9) == 9);
  int one = 1, size = 0, size_after = 0;
  socklen_t length = sizeof size;
  MUST(setsockopt(s[0], SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one) == 0);
  int big = 300000;
  setsockopt(s[1], SOL_SOCKET, SO_SNDBUF, &big, sizeof big);
  getsockopt(s[1], SOL_SOCKET, SO_SNDBUF, &size, &length);
  MUST(fcntl(s[1], F_SETFL, O_NONBLOCK) == 0);
  cut();
  size_t got = 0;
  ssize_t n;
  while (got < 50000 && (n = read(s[1], back + got, 50000 - got)) > 0)
    got += n;
  EQUAL(got, 50000);
  CHECK(!memcmp(data, back, 50000));
  EQUAL(read(s[1], back, 1), -1);
  EQUAL(errno, EAGAIN);
  EQUAL(read(s[0], back, 100), 9);
  CHECK(!memcmp(back, "other way", 9));
  EQUAL(getsockopt(s[0], SOL_SOCKET, SO_KEEPALIVE, &one, &length), 0);
  EQUAL(one, 1);
  EQUAL(getsockopt(s[1], SOL_SOCKET, SO_SNDBUF, &size_after, &length), 0);
  EQUAL(size_after, size);
  EQUAL(write(s[0], "again", 5), 5);
  EQUAL(read(s[1], back, 100), 5);
}

static void credentials_pair(void) { // each message tells who sent it
  int s[2], one = 1;
  MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, s) == 0);
  MUST(setsockopt(s[1], SOL_SOCKET, SO_PASSCRED, &one, sizeof one) == 0);
  MUST(write(s[0], "from me", 7) == 7);
  cut();
  char data[16], control[CMSG_SPACE(sizeof(struct ucred))];
  struct iovec v = {data, sizeof data};
  struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  EQUAL(recvmsg(s[1], &m, 0), 7);
  struct cmsghdr *c = CMSG_FIRSTHDR(&m);
  CHECK(c && c->cmsg_type == SCM_CREDENTIALS);
  if (c) {
    struct ucred who;
    memcpy(&who, CMSG_DATA(c), sizeof who);
    EQUAL(who.pid, getpid());
    EQUAL(who.uid, getuid());
  }
}

static void message_pairs(void) {
  static const int kinds[] = {SOCK_DGRAM, SOCK_SEQPACKET};
  int s[2][2];
  for (int k = 0; k < 2; k++) {
    MUST(socketpair(AF_UNIX, kinds[k], 0, s[k]) == 0);
    MUST(send(s[k][0], "", 0, 0) == 0 && send(s[k][0], "first", 5, 0) == 5 && send(s[k][0], "third one", 9, 0) == 9);
    MUST(send(s[k][1], "back", 4, 0) == 4);
  }
  cut();
  char c[64];
  for (int k = 0; k < 2; k++) {
    EQUAL(recv(s[k][1], c, sizeof c, 0), 0);
    EQUAL(recv(s[k][1], c, sizeof c, 0), 5);
    EQUAL(recv(s[k][1], c, sizeof c, MSG_DONTWAIT), 9);
    CHECK(!memcmp(c, "third one", 9));
    EQUAL(recv(s[k][1], c, sizeof c, MSG_DONTWAIT), -1);
    EQUAL(recv(s[k][0], c, sizeof c, 0), 4);
    int type = 0;
    socklen_t length = sizeof type;
    getsockopt(s[k][0], SOL_SOCKET, SO_TYPE, &type, &length);
    EQUAL(type, kinds[k]);
  }
}

static void half_closed_pair(void) {
  int s[2], t[2];
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, t) == 0);
  MUST(write(s[0], "last words", 10) == 10);
  MUST(shutdown(s[0], SHUT_WR) == 0);
  MUST(write(t[0], "orphan", 6) == 6);
  close(t[0]); // the other end is gone altogether
  cut();
  char c[64];
  EQUAL(read(s[1], c, sizeof c), 10);
  EQUAL(read(s[1], c, sizeof c), 0);
  EQUAL(write(s[1], "still", 5), 5);
  EQUAL(read(s[0], c, sizeof c), 5);
  EQUAL(send(s[0], "x", 1, MSG_NOSIGNAL), -1);
  EQUAL(errno, EPIPE);
  EQUAL(read(t[1], c, sizeof c), 6);
  EQUAL(read(t[1], c, sizeof c), 0);
  EQUAL(send(t[1], "x", 1, MSG_NOSIGNAL), -1);
}

static int tcp_options[][3] = {{SOL_SOCKET, SO_REUSEADDR, 1},       {SOL_SOCKET, SO_KEEPALIVE, 1},
                               {SOL_SOCKET, SO_RCVBUF, 50000},      {IPPROTO_TCP, TCP_NODELAY, 1},
                               {IPPROTO_TCP, TCP_DEFER_ACCEPT, 3},  {IPPROTO_TCP, TCP_KEEPIDLE, 77},
                               {IPPROTO_TCP, TCP_FASTOPEN, 5},      {SOL_SOCKET, SO_LINGER, 0},
                               {SOL_SOCKET, SO_PRIORITY, 3}};

static void listening_tcp(int family) {
  int s = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s < 0)
    SKIP("no IPv%d here", family == AF_INET ? 4 : 6);
  struct sockaddr_in6 address, seen;
  socklen_t length = sizeof address;
  memset(&address, 0, sizeof address);
  address.sin6_family = family;
  if (family == AF_INET)
    ((struct sockaddr_in *)&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  else
    address.sin6_addr = in6addr_loopback;
  int before[COUNT(tcp_options)];
  for (size_t i = 0; i < COUNT(tcp_options); i++) {
    socklen_t four = 4;
    if (tcp_options[i][2])
      setsockopt(s, tcp_options[i][0], tcp_options[i][1], &tcp_options[i][2], 4);
    getsockopt(s, tcp_options[i][0], tcp_options[i][1], &before[i], &four);
  }
  int one = 1;
  if (family == AF_INET6)
    MUST(setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one) == 0);
  if (bind(s, (void *)&address, family == AF_INET ? sizeof(struct sockaddr_in) : sizeof address))
    SKIP("no loopback of this family");
  MUST(listen(s, 17) == 0);
  MUST(getsockname(s, (void *)&address, &length) == 0);
  cut();
  EQUAL(getsockname(s, (void *)&seen, &length), 0);
  CHECK(!memcmp(&seen, &address, length));
  EQUAL(fcntl(s, F_GETFD), FD_CLOEXEC);
  for (size_t i = 0; i < COUNT(tcp_options); i++) {
    int after = -1;
    socklen_t four = 4;
    getsockopt(s, tcp_options[i][0], tcp_options[i][1], &after, &four);
    if (after != before[i]) {
      say("option %d/%d is %d, expected %d", tcp_options[i][0], tcp_options[i][1], after, before[i]);
      CHECK(!"socket options kept");
    }
  }
  int zero = 0;
  setsockopt(s, IPPROTO_TCP, TCP_DEFER_ACCEPT, &zero, sizeof zero);
  int c = socket(family, SOCK_STREAM, 0);
  EQUAL(connect(c, (void *)&address, length), 0);
  int a = accept(s, 0, 0);
  CHECK(a >= 0);
  char byte = 0;
  EQUAL(write(c, "q", 1), 1);
  EQUAL(read(a, &byte, 1), 1);
  EQUAL(byte, 'q');
}

static void listening_tcp4(void) {
  listening_tcp(AF_INET);
}

static void listening_tcp6(void) {
  listening_tcp(AF_INET6);
}

// Whom the file of a socket lets in besides its owner and group, and attributes of what has no name.
static void file_attributes(void) {
  static const struct { uint16_t tag, rights; uint32_t id; } entries[] = {{1, 6, -1}, {2, 7, 1234}, {4, 0, -1}, {0x10, 7, -1}, {0x20, 0, -1}};
  static const char list[] = "system.posix_acl_access", own[] = "user.kept";
  unsigned char access[4 + sizeof entries] = {2}, back[64];
  memcpy(access + 4, entries, sizeof entries);
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  snprintf(a.sun_path, sizeof a.sun_path, "%s", path_of("door"));
  int door = socket(AF_UNIX, SOCK_STREAM, 0), memory = memfd_create("attributes", 0);
  MUST(door >= 0 && memory >= 0 && !bind(door, (void *)&a, sizeof a) && !listen(door, 3) && !chmod(a.sun_path, 0600));
  if (setxattr(a.sun_path, list, access, sizeof access, 0))
    SKIP("no access lists here");
  MUST(!mkdir(path_of("folder"), 0700));
  int folder = open(path_of("folder"), O_RDONLY | O_DIRECTORY);
  int all[] = {memory, folder}, has[COUNT(all)];
  for (size_t i = 0; i < COUNT(all); i++)
    has[i] = !fsetxattr(all[i], own, "value", 5, 0);
  MUST(!rmdir(path_of("folder")));
  cut();
  EQUAL(getxattr(a.sun_path, list, back, sizeof back), sizeof access);
  CHECK(!memcmp(back, access, sizeof access));
  struct stat s;
  EQUAL(stat(a.sun_path, &s), 0);
  EQUAL(s.st_mode & 07777, 0670);
  for (size_t i = 0; i < COUNT(all); i++)
    if (has[i]) {
      EQUAL(fgetxattr(all[i], own, back, sizeof back), 5);
      CHECK(!memcmp(back, "value", 5));
    }
}

static void listening_unix(void) {
  int named = socket(AF_UNIX, SOCK_STREAM, 0), hidden = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
  struct sockaddr_un address = {.sun_family = AF_UNIX}, hidden_address = {.sun_family = AF_UNIX};
  MUST(chdir(directory) == 0); // paths of sockets are short
  strcpy(address.sun_path, "socket");
  int length = 2 + 1 + snprintf(hidden_address.sun_path + 1, 100, "stillpoint-test-%d", getpid());
  MUST(bind(named, (void *)&address, sizeof address) == 0 && listen(named, 5) == 0);
  MUST(chmod("socket", 0712) == 0);
  MUST(bind(hidden, (void *)&hidden_address, length) == 0 && listen(hidden, 9) == 0);
  int client = socket(AF_UNIX, SOCK_STREAM, 0);
  MUST(connect(client, (void *)&address, sizeof address) == 0);
  int accepted = accept(named, 0, 0);
  MUST(accepted >= 0);
  cut();
  int ends[] = {named, accepted, client};
  for (size_t i = 0; i < COUNT(ends); i++) {
    struct sockaddr_un told = {0};
    socklen_t room = sizeof told;
    EQUAL((i < 2 ? getsockname : getpeername)(ends[i], (void *)&told, &room), 0);
    CHECK(!strcmp(told.sun_path, "socket"));
  }
  EQUAL(write(client, "x", 1), 1);
  struct stat s;
  EQUAL(stat("socket", &s), 0);
  EQUAL(s.st_mode & 0777, 0712);
  int c = socket(AF_UNIX, SOCK_STREAM, 0), d = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  EQUAL(connect(c, (void *)&address, sizeof address), 0);
  CHECK(accept(named, 0, 0) >= 0);
  EQUAL(accept(hidden, 0, 0), -1);
  EQUAL(errno, EAGAIN);
  EQUAL(connect(d, (void *)&hidden_address, length), 0);
  CHECK(accept(hidden, 0, 0) >= 0);
}

// --- descriptors that are objects of the kernel

static void eventfds(void) {
  int a = eventfd(5, EFD_NONBLOCK), b = eventfd(3, EFD_SEMAPHORE | EFD_CLOEXEC);
  uint64_t n = 1ull << 40;
  MUST(write(a, &n, 8) == 8);
  cut();
  EQUAL(read(a, &n, 8), 8);
  EQUAL(n, (1ull << 40) + 5);
  EQUAL(read(a, &n, 8), -1);
  EQUAL(errno, EAGAIN);
  for (int i = 0; i < 3; i++) {
    EQUAL(read(b, &n, 8), 8);
    EQUAL(n, 1);
  }
  EQUAL(fcntl(b, F_GETFD), FD_CLOEXEC);
}

static void signalfds(void) {
  sigset_t set, other;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigemptyset(&other);
  sigaddset(&other, SIGUSR2);
  sigprocmask(SIG_BLOCK, &set, 0);
  sigprocmask(SIG_BLOCK, &other, 0);
  int a = signalfd(-1, &set, SFD_NONBLOCK), b = signalfd(-1, &other, SFD_NONBLOCK);
  MUST(a >= 0 && b >= 0);
  union sigval v = {.sival_int = 31};
  sigqueue(getpid(), SIGUSR1, v);
  cut();
  struct signalfd_siginfo info;
  EQUAL(read(b, &info, sizeof info), -1);
  EQUAL(errno, EAGAIN);
  EQUAL(read(a, &info, sizeof info), (ssize_t)sizeof info);
  EQUAL(info.ssi_signo, SIGUSR1);
  EQUAL(info.ssi_int, 31);
  kill(getpid(), SIGUSR2);
  EQUAL(read(b, &info, sizeof info), (ssize_t)sizeof info);
}

static int ready_of(int epoll, uint64_t *data) {
  struct epoll_event e = {0};
  int n = epoll_wait(epoll, &e, 1, 0);
  *data = e.data.u64;
  return n == 1 ? (int)e.events : n;
}

static void epolls(void) {
  int outer = epoll_create1(EPOLL_CLOEXEC), inner = epoll_create1(0), a[2], b[2], c[2], d[2];
  MUST(pipe(a) == 0 && pipe(b) == 0 && pipe(c) == 0 && pipe(d) == 0);
  struct epoll_event e;
  e = (struct epoll_event){.events = EPOLLIN, .data.u64 = 0xaaaaaaaabbbbbbbb};
  MUST(epoll_ctl(inner, EPOLL_CTL_ADD, a[0], &e) == 0);
  e = (struct epoll_event){.events = EPOLLIN, .data.u64 = 2};
  MUST(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &e) == 0);
  e = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 3};
  MUST(epoll_ctl(outer, EPOLL_CTL_ADD, b[0], &e) == 0);
  uint64_t data = 0;
  MUST(write(b[1], "x", 1) == 1);
  MUST(ready_of(outer, &data) == EPOLLIN && data == 3); // the one shot is spent
  e = (struct epoll_event){.events = EPOLLIN | EPOLLET, .data.u64 = 4};
  MUST(epoll_ctl(outer, EPOLL_CTL_ADD, c[0], &e) == 0);
  // Watched under a number that has since been given to another file.
  int old = dup(d[0]);
  e = (struct epoll_event){.events = EPOLLIN, .data.u64 = 5};
  MUST(epoll_ctl(inner, EPOLL_CTL_ADD, old, &e) == 0);
  close(old);
  MUST(open("/dev/null", O_RDONLY) == old);
  cut();
  EQUAL(ready_of(outer, &data), 0);
  EQUAL(write(a[1], "x", 1), 1);
  EQUAL(ready_of(outer, &data), EPOLLIN);
  EQUAL(data, 2);
  EQUAL(ready_of(inner, &data), EPOLLIN);
  EQUAL(data, 0xaaaaaaaabbbbbbbb);
  char byte;
  EQUAL(read(a[0], &byte, 1), 1);
  EQUAL(write(d[1], "x", 1), 1);
  EQUAL(ready_of(inner, &data), EPOLLIN);
  EQUAL(data, 5);
  EQUAL(read(d[0], &byte, 1), 1);
  EQUAL(write(c[1], "x", 1), 1);
  EQUAL(ready_of(outer, &data), EPOLLIN);
  EQUAL(data, 4);
  EQUAL(ready_of(outer, &data), 0); // edge-triggered: told once
  e = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 33};
  EQUAL(epoll_ctl(outer, EPOLL_CTL_MOD, b[0], &e), 0);
  EQUAL(ready_of(outer, &data), EPOLLIN);
  EQUAL(data, 33);
  EQUAL(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &e), -1);
  EQUAL(errno, EEXIST);
}

static void inotifys(void) {
  mkdir(path_of("watched"), 0700);
  close(create("watched/file", O_WRONLY, "x"));
  int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  int first = inotify_add_watch(fd, path_of("watched"), IN_CREATE | IN_DELETE);
  int second = inotify_add_watch(fd, directory, IN_MODIFY);
  MUST(inotify_rm_watch(fd, second) == 0);
  int third = inotify_add_watch(fd, path_of("watched/file"), IN_MODIFY | IN_ONESHOT);
  MUST(fd >= 0 && first > 0 && third > second);
  struct {
    struct inotify_event e;
    char name[300];
  } event;
  while (read(fd, &event, sizeof event) > 0) // nothing unread at the cut
    ;
  cut();
  close(create("watched/new", O_WRONLY, ""));
  CHECK(read(fd, &event, sizeof event) > 0);
  EQUAL(event.e.wd, first);
  EQUAL(event.e.mask, IN_CREATE);
  CHECK(!strcmp(event.e.name, "new"));
  int w = open(path_of("watched/file"), O_WRONLY);
  EQUAL(write(w, "y", 1), 1);
  CHECK(read(fd, &event, sizeof event) > 0);
  EQUAL(event.e.wd, third);
  EQUAL(event.e.mask, IN_MODIFY);
  EQUAL(inotify_rm_watch(fd, first), 0);
}

// Folders in folders that are all gone, with what was in them.
static void deleted_folders(void) {
  MUST(!mkdir(path_of("outer"), 0700) && !mkdir(path_of("outer/inner"), 0700) && !mkdir(path_of("outer/inner/last"), 0710));
  int files[] = {create("outer/inner/one", O_RDWR, "the first"), create("outer/two", O_RDWR, "the second")};
  int folders[] = {open(path_of("outer/inner/last"), O_RDONLY | O_DIRECTORY), open(path_of("outer"), O_RDONLY | O_DIRECTORY)};
  MUST(folders[0] >= 0 && folders[1] >= 0);
  MUST(!unlink(path_of("outer/inner/one")) && !unlink(path_of("outer/two")));
  MUST(!rmdir(path_of("outer/inner/last")) && !rmdir(path_of("outer/inner")) && !rmdir(path_of("outer")));
  cut();
  struct stat s;
  for (int i = 0; i < 2; i++) {
    char text[16] = {0};
    EQUAL(pread(files[i], text, sizeof text, 0), i ? 10 : 9);
    CHECK(!strcmp(text, i ? "the second" : "the first"));
    EQUAL(fstat(files[i], &s), 0);
    EQUAL(s.st_nlink, 0);
    EQUAL(fstat(folders[i], &s), 0);
    EQUAL(s.st_nlink, 0);
  }
  EQUAL(access(path_of("outer"), F_OK), -1);
}

// Who has locked a file is told: the program itself.
static void lock_owner(void) {
  int fd = create("locked", O_RDWR, "x");
  MUST(!flock(fd, LOCK_EX));
  cut();
  char path[64], text[512] = {0}, own[32];
  snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
  snprintf(own, sizeof own, "WRITE %d ", getpid());
  int info = open(path, O_RDONLY);
  CHECK(read(info, text, sizeof text - 1) > 0);
  CHECK(strstr(text, own));
  int other = open(path_of("locked"), O_RDWR);
  EQUAL(flock(other, LOCK_SH | LOCK_NB), -1);
  EQUAL(flock(fd, LOCK_UN), 0);
  EQUAL(flock(other, LOCK_SH | LOCK_NB), 0);
}

// Two sockets listen at one port, which one of them would not allow any more.
static void shared_port(void) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof at;
  int on = 1, off = 0, got = -1, doors[2];
  for (int i = 0; i < 2; i++) {
    doors[i] = socket(AF_INET, SOCK_STREAM, 0);
    MUST(!setsockopt(doors[i], SOL_SOCKET, SO_REUSEPORT, &on, sizeof on) && !bind(doors[i], (void *)&at, sizeof at));
    MUST(!listen(doors[i], 5) && !getsockname(doors[i], (void *)&at, &length));
  }
  MUST(!setsockopt(doors[0], SOL_SOCKET, SO_REUSEPORT, &off, sizeof off));
  cut();
  for (int i = 0; i < 2; i++) {
    length = sizeof got;
    EQUAL(getsockopt(doors[i], SOL_SOCKET, SO_REUSEPORT, &got, &length), 0);
    EQUAL(got, i);
  }
  int client = socket(AF_INET, SOCK_STREAM, 0);
  EQUAL(connect(client, (void *)&at, sizeof at), 0);
  struct pollfd both[] = {{doors[0], POLLIN, 0}, {doors[1], POLLIN, 0}};
  EQUAL(poll(both, 2, 5000), 1);
}

static int runs(int fd) {
  char *words[] = {"true", 0}, *nothing[] = {0};
  int status = -1;
  pid_t pid = fork();
  if (!pid) {
    fexecve(fd, words, nothing);
    _exit(errno);
  }
  waitpid(pid, &status, 0);
  return status >> 8;
}

// A memfd can be executed although it is open for writing, unless it was opened for that once more; and one that is sealed stays so.
static void memfd_programs(void) {
  int plain = memfd_create("tool", MFD_CLOEXEC), sealed = memfd_create("sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  int program = open("/bin/true", O_RDONLY | O_CLOEXEC);
  char buffer[4096];
  for (ssize_t n; (n = read(program, buffer, sizeof buffer)) > 0;)
    MUST(write(plain, buffer, n) == n && write(sealed, buffer, n) == n);
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
  MUST(!fcntl(sealed, F_ADD_SEALS, seals));
  char *mapped = mmap(0, 4096, PROT_READ, MAP_SHARED, sealed, 0);
  if (mapped == MAP_FAILED)
    SKIP("this kernel maps nothing that is sealed");
  MUST(!runs(plain) && !runs(sealed));
  cut();
  EQUAL(runs(plain), 0);
  EQUAL(runs(sealed), 0);
  EQUAL(fcntl(sealed, F_GET_SEALS), seals);
  CHECK(!memcmp(mapped, "\177ELF", 4));
  EQUAL(mprotect(mapped, 4096, PROT_READ | PROT_WRITE), -1);
  EQUAL(write(sealed, "x", 1), -1);
  EQUAL(pwrite(plain, "\177", 1, 0), 1);
}

// All that can be told of is watched: a look at any of it from outside is told like any other.
static void watched_closely(void) {
  mkdir(path_of("watched"), 0700);
  mkdir(path_of("watched/folder"), 0700);
  int file = create("watched/file", O_RDWR, "contents"), gone = create("watched/gone", O_RDWR, "only here");
  int folder = open(path_of("watched/folder"), O_RDONLY | O_DIRECTORY), log = create("watched/log", O_WRONLY, "written");
  char *mapped = mmap(0, 4096, PROT_READ, MAP_PRIVATE, file, 0);
  MUST(mapped != MAP_FAILED && folder >= 0 && !unlink(path_of("watched/gone")));
  int all = inotify_init1(IN_NONBLOCK | IN_CLOEXEC), opens = inotify_init1(IN_NONBLOCK);
  const char *names[] = {"watched", "watched/folder", "watched/file"};
  for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
    MUST(inotify_add_watch(all, path_of(names[i]), IN_ALL_EVENTS) > 0);
  MUST(inotify_add_watch(opens, path_of("watched"), IN_OPEN | IN_CLOSE | IN_ONLYDIR) > 0);
  cut();
  char events[4096], text[100] = {0};
  EQUAL(read(all, events, sizeof events), -1);
  EQUAL(read(opens, events, sizeof events), -1);
  EQUAL(pread(gone, text, sizeof text, 0), 9);
  CHECK(!strcmp(text, "only here"));
  EQUAL(lseek(gone, 0, SEEK_CUR), 9);
  EQUAL(lseek(log, 0, SEEK_CUR), 7);
  CHECK(!strncmp(mapped, "contents", 8));
  EQUAL(faccessat(folder, "nothing", F_OK, 0), -1);
  while (read(all, events, sizeof events) > 0)
    ;
  close(open(path_of("watched/log"), O_RDONLY));
  struct inotify_event *event = (void *)events;
  CHECK(read(all, events, sizeof events) > 0);
  EQUAL(event->mask, IN_OPEN);
  CHECK(!strcmp(event->name, "log"));
}

#ifndef FAN_REPORT_TARGET_FID
#define FAN_REPORT_TARGET_FID 0x1000
#endif
#ifndef FAN_RENAME
#define FAN_RENAME 0x10000000
#endif
#ifndef FAN_MARK_EVICTABLE
#define FAN_MARK_EVICTABLE 0x200
#endif

static int mark(int group, unsigned flags, uint64_t mask, const char *name) {
  return fanotify_mark(group, FAN_MARK_ADD | flags, mask, AT_FDCWD, path_of(name));
}

// The next event of a group, without the name at its end.
static struct fanotify_event_metadata next(int group, const char **name) {
  static char buffer[4096];
  struct fanotify_event_metadata *event = (void *)buffer;
  ssize_t length = read(group, buffer, sizeof buffer);
  CHECK(length >= (ssize_t)sizeof *event && event->event_len == length); // no other one
  if (length < (ssize_t)sizeof *event)
    memset(event, 0, sizeof *event);
  struct fanotify_event_info_fid *info = (void *)(event + 1);
  struct file_handle *handle = (void *)info->handle;
  if (name)
    *name = (char *)handle->f_handle + handle->handle_bytes;
  return *event;
}

// The lines of fdinfo, sorted: in which order its marks were made does not matter.
static char *told_of(int group) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fdinfo/%d", group);
  char *text = calloc(1, 8192);
  int fd = open(path, O_RDONLY), count = 0;
  char *lines[64], *all = calloc(1, 8192);
  MUST(fd >= 0 && read(fd, text, 8191) > 0);
  close(fd);
  for (char *at = strtok(text, "\n"); at; at = strtok(0, "\n"))
    if (!strncmp(at, "fanotify", 8))
      lines[count++] = at;
  for (int i = 0; i < count; i++)
    for (int j = i + 1; j < count; j++)
      if (strcmp(lines[i], lines[j]) > 0) {
        char *other = lines[i];
        lines[i] = lines[j];
        lines[j] = other;
      }
  for (int i = 0; i < count; i++)
    strcat(strcat(all, lines[i]), "\n");
  free(text);
  return all;
}

static void fanotifys(void) {
  mkdir(path_of("watched"), 0700);
  close(create("watched/file", O_WRONLY, "x"));
  close(create("watched/quiet", O_WRONLY, "x"));
  int opens = fanotify_init(FAN_CLASS_NOTIF | FAN_CLOEXEC | FAN_NONBLOCK, O_RDONLY | O_NOATIME);
  if (opens < 0)
    SKIP("no fanotify here");
  int names = fanotify_init(FAN_REPORT_FID | FAN_REPORT_DIR_FID | FAN_REPORT_NAME | FAN_REPORT_TARGET_FID |
                            FAN_NONBLOCK | FAN_UNLIMITED_QUEUE, O_RDONLY);
  MUST(names >= 0);
  MUST(!mark(opens, 0, FAN_MODIFY | FAN_CLOSE_WRITE | FAN_EVENT_ON_CHILD, "watched"));
  MUST(!mark(opens, FAN_MARK_IGNORED_MASK | FAN_MARK_IGNORED_SURV_MODIFY, FAN_MODIFY | FAN_CLOSE, "watched/quiet"));
  MUST(!mark(names, 0, FAN_CREATE | FAN_DELETE | FAN_RENAME | FAN_ONDIR, "watched"));
  MUST(!mark(names, FAN_MARK_EVICTABLE, FAN_ATTRIB, "watched/file"));
  MUST(!mark(names, 0, FAN_DELETE_SELF | FAN_MOVE_SELF | FAN_ONDIR, "."));
  char *before[2] = {told_of(opens), told_of(names)};
  MUST(fcntl(names, F_SETFL, fcntl(names, F_GETFL) & ~O_NONBLOCK) == 0);
  cut();
  CHECK(!strcmp(before[0], told_of(opens)));
  CHECK(!strcmp(before[1], told_of(names)));
  EQUAL(fcntl(opens, F_GETFD), FD_CLOEXEC);
  EQUAL(fcntl(names, F_GETFD), 0);
  EQUAL(fcntl(names, F_GETFL) & O_NONBLOCK, 0);
  char nothing[100];
  EQUAL(read(opens, nothing, sizeof nothing), -1); // nothing that a restore did is told
  EQUAL(errno, EAGAIN);
  EQUAL(fcntl(names, F_SETFL, O_NONBLOCK), 0);
  struct fanotify_event_metadata event;
  EQUAL(read(names, nothing, sizeof nothing), -1);
  EQUAL(errno, EAGAIN);
  const char *name = "";
  EQUAL(mkdir(path_of("watched/folder"), 0700), 0);
  event = next(names, &name);
  EQUAL(event.mask, FAN_CREATE | FAN_ONDIR);
  EQUAL(event.fd, FAN_NOFD);
  EQUAL(event.pid, getpid());
  CHECK(!strcmp(name, "folder"));
  EQUAL(chmod(path_of("watched/file"), 0600), 0);
  event = next(names, 0);
  EQUAL(event.mask, FAN_ATTRIB);
  int w = open(path_of("watched/quiet"), O_WRONLY);
  EQUAL(write(w, "y", 1), 1);
  close(w);
  EQUAL(read(opens, nothing, sizeof nothing), -1); // ignored, also from now on
  w = open(path_of("watched/file"), O_WRONLY);
  EQUAL(write(w, "y", 1), 1);
  event = next(opens, 0);
  EQUAL(event.mask, FAN_MODIFY);
  EQUAL(event.pid, getpid());
  EQUAL(fcntl(event.fd, F_GETFL) & (O_ACCMODE | O_NOATIME), O_RDONLY | O_NOATIME);
  struct stat it, opened;
  CHECK(!fstat(w, &it) && !fstat(event.fd, &opened) && it.st_ino == opened.st_ino);
  close(event.fd);
  EQUAL(fanotify_mark(names, FAN_MARK_REMOVE, FAN_CREATE, AT_FDCWD, path_of("watched")), 0);
  EQUAL(fanotify_mark(names, FAN_MARK_FLUSH, 0, AT_FDCWD, 0), 0);
}

// How the process of a handle ended: -1 where the kernel does not tell.
static int how_ended(int handle) {
  uint64_t info[8] = {1 << 3}; // PIDFD_INFO_EXIT
  return ioctl(handle, 0xc040ff0b, info) || !(info[0] & 1 << 3) ? -1 : (int)(info[7] >> 32);
}

static void pidfds(void) {
  static const int ways[] = {7 << 8, SIGKILL, SIGSEGV};
  int fd = syscall(SYS_pidfd_open, getpid(), 0), ended[4];
  MUST(fd >= 0);
  for (int i = 0; i < 3; i++) {
    pid_t pid = fork();
    if (!pid) {
      prctl(PR_SET_DUMPABLE, 0);
      if (i)
        kill(getpid(), ways[i]);
      _exit(ways[i] >> 8);
    }
    MUST((ended[i] = syscall(SYS_pidfd_open, pid, i ? 0 : O_NONBLOCK)) >= 0);
    if (!i)
      MUST((ended[3] = syscall(SYS_pidfd_open, pid, 0)) >= 0);
    MUST(waitpid(pid, 0, 0) == pid);
  }
  int told[3];
  for (int i = 0; i < 3; i++)
    told[i] = how_ended(ended[i]);
  cut();
  struct stat a, b;
  for (int i = 0; i < 4; i++) {
    struct pollfd p = {.fd = ended[i], .events = POLLIN};
    EQUAL(poll(&p, 1, 0), 1);
    EQUAL(syscall(SYS_pidfd_send_signal, ended[i], 0, 0, 0), -1);
    EQUAL(errno, ESRCH);
    EQUAL(how_ended(ended[i]), told[i % 3]);
    CHECK(told[i % 3] == -1 || told[i % 3] == ways[i % 3]);
    EQUAL(fcntl(ended[i], F_GETFL) & O_NONBLOCK, i ? 0 : O_NONBLOCK);
  }
  CHECK(!fstat(ended[0], &a) && !fstat(ended[3], &b) && a.st_ino == b.st_ino);
  EQUAL(syscall(SYS_pidfd_send_signal, fd, 0, 0, 0), 0);
  signal(SIGUSR1, SIG_IGN);
  EQUAL(syscall(SYS_pidfd_send_signal, fd, SIGUSR1, 0, 0), 0);
  struct pollfd p = {.fd = fd, .events = POLLIN};
  EQUAL(poll(&p, 1, 0), 0);
}

// Handles to children that have ended, and are waited for later.
static void pidfds_unwaited(void) {
  pid_t pids[2];
  int handles[2];
  for (int i = 0; i < 2; i++) {
    pids[i] = fork();
    if (!pids[i])
      _exit(i ? 5 : 0);
    MUST((handles[i] = syscall(SYS_pidfd_open, pids[i], i ? O_NONBLOCK : 0)) >= 0);
    siginfo_t info;
    MUST(waitid(P_PID, pids[i], &info, WEXITED | WNOWAIT) == 0);
  }
  cut();
  for (int i = 0; i < 2; i++) {
    struct pollfd p = {.fd = handles[i], .events = POLLIN};
    siginfo_t info = {0};
    EQUAL(poll(&p, 1, 0), 1);
    EQUAL(syscall(SYS_pidfd_send_signal, handles[i], 0, 0, 0), 0);
    EQUAL(waitid(3 /* P_PIDFD */, handles[i], &info, WEXITED), 0);
    EQUAL(info.si_pid, pids[i]);
    EQUAL(info.si_status, i ? 5 : 0);
    EQUAL(syscall(SYS_pidfd_send_signal, handles[i], 0, 0, 0), -1);
    EQUAL(fcntl(handles[i], F_GETFL) & O_NONBLOCK, i ? O_NONBLOCK : 0);
  }
}

// --- terminals and devices

static void ptys(void) {
  int master = open("/dev/ptmx", O_RDWR | O_NOCTTY), unlock = 0, number = -1;
  MUST(master >= 0 && ioctl(master, TIOCSPTLCK, &unlock) == 0 && ioctl(master, TIOCGPTN, &number) == 0);
  char name[64];
  snprintf(name, sizeof name, "/dev/pts/%d", number);
  int slave = open(name, O_RDWR | O_NOCTTY);
  MUST(slave >= 0);
  struct termios before, after;
  tcgetattr(slave, &before);
  cfmakeraw(&before);
  before.c_cc[VMIN] = 3;
  before.c_cc[VINTR] = 5;
  cfsetspeed(&before, B9600);
  tcsetattr(slave, TCSANOW, &before);
  struct winsize size = {33, 77, 5, 6}, seen = {0};
  MUST(ioctl(master, TIOCSWINSZ, &size) == 0);
  cut();
  EQUAL(tcgetattr(slave, &after), 0);
  EQUAL(after.c_lflag, before.c_lflag);
  EQUAL(after.c_iflag, before.c_iflag);
  EQUAL(after.c_oflag, before.c_oflag);
  EQUAL(after.c_cc[VMIN], 3);
  EQUAL(after.c_cc[VINTR], 5);
  EQUAL(cfgetospeed(&after), B9600);
  EQUAL(ioctl(slave, TIOCGWINSZ, &seen), 0);
  CHECK(!memcmp(&size, &seen, sizeof size));
  char c[16];
  EQUAL(write(master, "typed", 5), 5);
  EQUAL(read(slave, c, sizeof c), 5);
  CHECK(!memcmp(c, "typed", 5));
  EQUAL(write(slave, "shown", 5), 5);
  EQUAL(read(master, c, sizeof c), 5);
  int now_number = -1;
  EQUAL(ioctl(master, TIOCGPTN, &now_number), 0);
  if (now_number != number)
    say("note: the terminal is now number %d, it was %d", now_number, number);
}

// Exclusive mode of a slave, packet mode of its master, and a slave that is locked.
static void pty_modes(void) {
  int master = open("/dev/ptmx", O_RDWR | O_NOCTTY), unlock = 0, on = 1, number = -1;
  MUST(master >= 0 && ioctl(master, TIOCSPTLCK, &unlock) == 0 && ioctl(master, TIOCGPTN, &number) == 0);
  char name[64];
  snprintf(name, sizeof name, "/dev/pts/%d", number);
  int slave = open(name, O_RDWR | O_NOCTTY), locked = open("/dev/ptmx", O_RDWR | O_NOCTTY);
  MUST(slave >= 0 && locked >= 0);
  struct termios raw;
  tcgetattr(slave, &raw);
  cfmakeraw(&raw);
  tcsetattr(slave, TCSANOW, &raw);
  MUST(ioctl(slave, TIOCEXCL) == 0 && ioctl(master, TIOCPKT, &on) == 0);
  cut();
  int exclusive = 0, packets = 0, lock = 0;
  EQUAL(ioctl(slave, TIOCGEXCL, &exclusive), 0);
  EQUAL(exclusive, 1);
  EQUAL(ioctl(master, TIOCGEXCL, &exclusive), 0);
  EQUAL(exclusive, 0);
  EQUAL(ioctl(master, TIOCGPKT, &packets), 0);
  EQUAL(packets, 1);
  EQUAL(ioctl(locked, TIOCGPTLCK, &lock), 0);
  EQUAL(lock, 1);
  char c[16] = {1};
  EQUAL(write(slave, "shown", 5), 5);
  EQUAL(read(master, c, sizeof c), 6);
  CHECK(!memcmp(c, "\0shown", 6));
  MUST(tcflush(slave, TCIFLUSH) == 0);
  EQUAL(read(master, c, sizeof c), 1);
  EQUAL(c[0], TIOCPKT_FLUSHREAD);
}

static int unread_master, unread_slave;
static volatile int has_read;
static char was_unread[16];

static void interrupted(int signal) {
  (void)signal;
}

// Reads what there is as soon as it is interrupted: by the stop of a checkpoint, for one.
static void *reads_when_interrupted(void *unused) {
  int poller = epoll_create1(EPOLL_CLOEXEC);
  struct epoll_event event;
  (void)unused;
  __atomic_store_n(&has_read, 1, __ATOMIC_SEQ_CST);
  while (epoll_wait(poller, &event, 1, 600000) >= 0 || errno != EINTR)
    ;
  EQUAL(read(unread_master, was_unread, sizeof was_unread), 5);
  wait_go();
  return 0;
}

static void pty_unread(void) { // only for a moment
  int unlock = 0;
  unread_master = open("/dev/ptmx", O_RDWR | O_NOCTTY);
  MUST(unread_master >= 0 && ioctl(unread_master, TIOCSPTLCK, &unlock) == 0);
  MUST((unread_slave = ioctl(unread_master, TIOCGPTPEER, O_RDWR | O_NOCTTY)) >= 0);
  struct sigaction action = {.sa_handler = interrupted};
  MUST(sigaction(SIGUSR1, &action, 0) == 0);
  MUST(write(unread_slave, "shown", 5) == 5);
  pthread_t reader = spawn(reads_when_interrupted, 0);
  while (!has_read)
    nap(0.001);
  nap(0.01);
  cut();
  pthread_kill(reader, SIGUSR1);
  pthread_join(reader, 0);
  CHECK(!memcmp(was_unread, "shown", 5));
}

static volatile int breaks, broken_fd;

static void breaks_lease(int signal, siginfo_t *info, void *context) {
  (void)signal;
  (void)context;
  breaks++;
  broken_fd = info->si_fd;
}

static void open_as_other(const char *path, int flags) {
  pid_t pid = fork();
  if (!pid)
    _exit(open(path, flags | O_NONBLOCK) < 0 && errno == EWOULDBLOCK ? 0 : 1);
  int status = -1;
  EQUAL(waitpid(pid, &status, 0), pid);
  EQUAL(status, 0);
}

static void leases(void) {
  close(open(path_of("read"), O_RDWR | O_CREAT, 0600));
  close(open(path_of("written"), O_RDWR | O_CREAT, 0600));
  int reads = open(path_of("read"), O_RDONLY | O_CLOEXEC), writes = open(path_of("written"), O_RDWR | O_CLOEXEC);
  MUST(reads >= 0 && writes >= 0);
  struct sigaction action = {.sa_sigaction = breaks_lease, .sa_flags = SA_SIGINFO | SA_RESTART};
  MUST(sigaction(SIGRTMIN, &action, 0) == 0);
  MUST(fcntl(reads, F_SETSIG, SIGRTMIN) == 0 && fcntl(writes, F_SETSIG, SIGRTMIN) == 0);
  if (fcntl(reads, F_SETLEASE, F_RDLCK) || fcntl(writes, F_SETLEASE, F_WRLCK))
    SKIP("no leases here");
  cut();
  EQUAL(breaks, 0);
  EQUAL(fcntl(reads, F_GETLEASE), F_RDLCK);
  EQUAL(fcntl(writes, F_GETLEASE), F_WRLCK);
  EQUAL(fcntl(reads, F_GETOWN), getpid());
  open_as_other(path_of("read"), O_WRONLY);
  EQUAL(breaks, 1);
  EQUAL(broken_fd, reads);
  EQUAL(fcntl(reads, F_SETLEASE, F_UNLCK), 0);
  open_as_other(path_of("written"), O_RDONLY);
  EQUAL(breaks, 2);
  EQUAL(broken_fd, writes);
  EQUAL(fcntl(writes, F_SETLEASE, F_UNLCK), 0);
}

static void devices(void) {
  static const char *names[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random"};
  int fd[5];
  for (int i = 0; i < 5; i++)
    MUST((fd[i] = open(names[i], i == 2 ? O_RDWR : O_RDONLY)) >= 0);
  char *p = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd[1], 0);
  MUST(p != MAP_FAILED);
  fill(p, PAGE, 3);
  cut();
  char c[16] = "x";
  EQUAL(read(fd[0], c, 1), 0);
  EQUAL(read(fd[1], c, 1), 1);
  EQUAL(c[0], 0);
  EQUAL(write(fd[2], c, 1), -1);
  EQUAL(errno, ENOSPC);
  EQUAL(read(fd[3], c, 16), 16);
  for (int i = 0; i < 5; i++) {
    struct stat a, b;
    fstat(fd[i], &a);
    stat(names[i], &b);
    EQUAL(a.st_rdev, b.st_rdev);
  }
  CHECK(filled(p, PAGE, 3));
  CHECK(all_zero(p + PAGE, 3 * PAGE));
}

// Devices that keep nothing of who has them open, and one whose name was removed.
static void idle_devices(void) {
  static const char *names[] = {"/dev/kmsg", "/dev/net/tun", "/dev/loop-control", "/dev/autofs", "/dev/kvm", "/dev/vsock", "/dev/cpu_dma_latency"};
  int fds[COUNT(names)], flags[COUNT(names)], opened = 0, gone = -1;
  char text[8192];
  struct stat then[COUNT(names)], now;
  for (size_t i = 0; i < COUNT(names); i++) {
    fds[i] = open(names[i], i ? O_RDWR : O_RDONLY | O_NONBLOCK);
    opened += fds[i] >= 0;
    MUST(fds[i] < 0 || fstat(fds[i], &then[i]) == 0);
    flags[i] = fcntl(fds[i], F_GETFL);
  }
  if (mknod(path_of("zero"), S_IFCHR | 0640, 0x105) == 0) {
    gone = open(path_of("zero"), O_RDWR);
    opened += gone >= 0;
    MUST(unlink(path_of("zero")) == 0);
  }
  if (!opened)
    SKIP("none of these devices can be opened");
  long long last = -1;
  while (fds[0] >= 0 && read(fds[0], text, sizeof text - 1) > 0)
    last = atoll(strchr(text, ',') + 1);
  cut();
  for (size_t i = 0; i < COUNT(names); i++)
    if (fds[i] >= 0) {
      EQUAL(fstat(fds[i], &now), 0);
      EQUAL(now.st_rdev, then[i].st_rdev);
      EQUAL(now.st_ino, then[i].st_ino);
      EQUAL(fcntl(fds[i], F_GETFL), flags[i]);
    }
  if (fds[0] >= 0) { // what was read is not read again
    ssize_t n = read(fds[0], text, sizeof text - 1);
    CHECK(n < 0 ? errno == EAGAIN : atoll(strchr(text, ',') + 1) > last);
  }
  if (fds[1] >= 0) {
    EQUAL(ioctl(fds[1], 0x800454d2 /* TUNGETIFF */, text), -1);
    EQUAL(errno, EBADFD);
  }
  if (fds[4] >= 0)
    EQUAL(ioctl(fds[4], 0xae00 /* KVM_GET_API_VERSION */, 0), 12);
  if (gone >= 0) {
    EQUAL(fstat(gone, &now), 0);
    EQUAL(now.st_rdev, 0x105);
    EQUAL(now.st_mode, S_IFCHR | 0640);
    EQUAL(now.st_nlink, 0);
    text[0] = 1;
    EQUAL(read(gone, text, 1), 1);
    EQUAL(text[0], 0);
  }
}

// --- locks; another process is who notices

static int may_lock(const char *name, int how, off_t start, off_t length, int write) {
  pid_t child = fork();
  if (child == 0) {
    int fd = open(path_of(name), O_RDWR);
    struct flock l = {.l_type = write ? F_WRLCK : F_RDLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    int r = how == 0   ? flock(fd, (write ? LOCK_EX : LOCK_SH) | LOCK_NB)
            : how == 1 ? fcntl(fd, F_SETLK, &l)
                       : fcntl(fd, 37 /* F_OFD_SETLK */, &l);
    _exit(r == 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

static void locks(void) {
  int a = create("flock", O_RDWR, "x"), b = create("posix", O_RDWR, "0123456789"), c = create("ofd", O_RDWR, "0123456789");
  int shared = create("shared", O_RDWR, "x");
  struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 2, .l_len = 3};
  MUST(flock(a, LOCK_EX) == 0 && flock(shared, LOCK_SH) == 0);
  MUST(fcntl(b, F_SETLK, &l) == 0);
  l.l_type = F_RDLCK;
  l.l_start = 100;
  l.l_len = 0; // to the end
  MUST(fcntl(b, F_SETLK, &l) == 0);
  l = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 5, .l_len = 2};
  MUST(fcntl(c, 37, &l) == 0);
  int duplicate = dup(a);
  cut();
  EQUAL(may_lock("flock", 0, 0, 0, 0), 0);
  EQUAL(may_lock("shared", 0, 0, 0, 0), 1);
  EQUAL(may_lock("shared", 0, 0, 0, 1), 0);
  EQUAL(may_lock("posix", 1, 2, 3, 0), 0);
  EQUAL(may_lock("posix", 1, 0, 2, 1), 1);
  EQUAL(may_lock("posix", 1, 5, 50, 1), 1);
  EQUAL(may_lock("posix", 1, 100000, 1, 1), 0);
  EQUAL(may_lock("posix", 1, 100000, 1, 0), 1);
  EQUAL(may_lock("ofd", 2, 5, 1, 0), 0);
  EQUAL(may_lock("ofd", 2, 7, 1, 1), 1);
  // Locks belong to whom they belonged to: this process can change its own.
  l = (struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = 2, .l_len = 3};
  EQUAL(fcntl(b, F_SETLK, &l), 0);
  EQUAL(may_lock("posix", 1, 2, 3, 1), 1);
  close(a);
  EQUAL(may_lock("flock", 0, 0, 0, 1), 0); // the duplicate still holds it
  close(duplicate);
  EQUAL(may_lock("flock", 0, 0, 0, 1), 1);
}

static volatile int notified;

static void on_io(int s, siginfo_t *info, void *context) {
  (void)s, (void)context;
  notified = info->si_fd;
}

static void signal_driven(void) { // O_ASYNC with owner and signal
  int s[2];
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0);
  struct sigaction a = {.sa_sigaction = on_io, .sa_flags = SA_SIGINFO};
  sigaction(SIGRTMIN + 2, &a, 0);
  MUST(fcntl(s[0], F_SETOWN, getpid()) == 0 && fcntl(s[0], 10 /* F_SETSIG */, SIGRTMIN + 2) == 0);
  MUST(fcntl(s[0], F_SETFL, O_ASYNC | O_NONBLOCK) == 0);
  cut();
  EQUAL(fcntl(s[0], F_GETOWN), getpid());
  EQUAL(fcntl(s[0], 11), SIGRTMIN + 2);
  EQUAL(write(s[1], "x", 1), 1);
  nap(0.02);
  EQUAL(notified, s[0]);
}

static void proc_files(void) {
  int fd = open("/proc/self/stat", O_RDONLY), dir = open("/proc/self/task", O_RDONLY | O_DIRECTORY);
  int namespaces[3];
  static const char *const kinds[] = {"net", "pid", "pid_for_children"};
  char before[4096] = {0}, after[4096] = {0};
  MUST(fd >= 0 && dir >= 0 && pread(fd, before, sizeof before - 1, 0) > 0);
  for (int i = 0; i < 3; i++) {
    snprintf(after, sizeof after, "/proc/self/ns/%s", kinds[i]);
    MUST((namespaces[i] = open(after, O_RDONLY)) >= 0);
  }
  cut();
  for (int i = 0; i < 3; i++) {
    struct stat held, own;
    snprintf(after, sizeof after, "/proc/self/ns/%s", kinds[i]);
    CHECK(!fstat(namespaces[i], &held) && !stat(after, &own) && held.st_ino == own.st_ino && held.st_dev == own.st_dev);
  }
  memset(after, 0, sizeof after);
  CHECK(pread(fd, after, sizeof after - 1, 0) > 0);
  EQUAL(atoi(after), getpid());
  char name[32];
  snprintf(name, sizeof name, "%d", getpid());
  EQUAL(faccessat(dir, name, F_OK, 0), 0);
}

// Slaves whose master is closed, one of them a standard stream.
static void hung_up(void) {
  int master = open("/dev/ptmx", O_RDWR | O_NOCTTY), unlock = 0, number = -1;
  MUST(master >= 0 && ioctl(master, TIOCSPTLCK, &unlock) == 0 && ioctl(master, TIOCGPTN, &number) == 0);
  char name[64], byte;
  snprintf(name, sizeof name, "/dev/pts/%d", number);
  int slave = open(name, O_RDWR | O_NOCTTY), writes = open(name, O_WRONLY | O_NOCTTY | O_NONBLOCK), was = dup(0);
  MUST(slave >= 0 && writes >= 0 && dup2(slave, 0) == 0);
  close(master);
  for (int turn = 0; turn < 2; turn++) {
    struct pollfd p = {.fd = slave, .events = POLLIN};
    EQUAL(read(slave, &byte, 1), 0);
    EQUAL(read(0, &byte, 1), 0);
    EQUAL(write(writes, "x", 1), -1);
    EQUAL(errno, EIO);
    EQUAL(poll(&p, 1, 0), 1);
    CHECK(p.revents & POLLHUP);
    EQUAL(isatty(slave), 0);
    EQUAL(fcntl(slave, F_GETFL) & O_ACCMODE, O_RDWR);
    EQUAL(fcntl(writes, F_GETFL) & (O_ACCMODE | O_NONBLOCK), O_WRONLY | O_NONBLOCK);
    if (!turn)
      cut();
  }
  dup2(was, 0);
}

// What is opened by a name in there is shown as deleted as soon as anybody looks the name up once more.
static void network_files(void) {
  int devices = open("/proc/net/dev", O_RDONLY), sockets = open("/proc/self/net/unix", O_RDONLY);
  char text[4096] = {0};
  MUST(devices >= 0 && sockets >= 0 && !access("/proc/net/dev", F_OK));
  cut();
  CHECK(pread(devices, text, sizeof text - 1, 0) > 0 && strstr(text, "Receive"));
  CHECK(pread(sockets, text, sizeof text - 1, 0) > 0 && strstr(text, "RefCount"));
}

static void *until_told(void *pipe) {
  char byte;
  CHECK(read(*(int *)pipe, &byte, 1) == 0);
  return 0;
}

// Those of a child and of a thread that are no more.
static void ended_proc_files(void) {
  static const char *const below[] = {"/stat", "/mem", "/task", "", "/ns", "/task/%d/status", "/oom_score_adj"};
  enum { FILES = sizeof below / sizeof *below, ALL = FILES + 2 };
  int ends[2], fd[ALL], kinds[ALL];
  char path[256], name[128], link[2][ALL][128];
  pthread_t thread;
  MUST(!pipe(ends));
  pid_t pid = fork();
  if (!pid)
    for (;;)
      pause();
  for (int i = 0; i < FILES; i++) {
    snprintf(name, sizeof name, below[i], pid);
    snprintf(path, sizeof path, "/proc/%d%s", pid, name);
    MUST((fd[i] = open(path, O_RDONLY)) >= 0);
  }
  lseek(fd[1], 4096, SEEK_SET);
  MUST(!kill(pid, SIGKILL) && waitpid(pid, 0, 0) == pid);
  MUST(!pthread_create(&thread, 0, until_told, &ends[0]));
  DIR *tasks = opendir("/proc/self/task");
  struct dirent *entry;
  pid_t tid = 0;
  while ((entry = readdir(tasks)))
    if (atoi(entry->d_name) > 0 && atoi(entry->d_name) != getpid())
      tid = atoi(entry->d_name);
  closedir(tasks);
  for (int i = FILES; i < ALL; i++) {
    snprintf(path, sizeof path, "/proc/self/task/%d%s", tid, i > FILES ? "/stat" : "");
    MUST((fd[i] = open(path, O_RDONLY)) >= 0);
  }
  close(ends[1]);
  MUST(!pthread_join(thread, 0));
  while (!access(path, F_OK))
    nap(0.001);
  for (int turn = 0; turn < 2; turn++) {
    for (int i = 0; i < ALL; i++) {
      struct stat stat;
      snprintf(path, sizeof path, "/proc/self/fd/%d", fd[i]);
      ssize_t len = readlink(path, link[turn][i], sizeof link[turn][i] - 1);
      CHECK(len > 0);
      link[turn][i][len > 0 ? len : 0] = 0;
      CHECK(!strncmp(link[turn][i], "/proc/", 6));
      // All but the number, which somebody else may have by now.
      memmove(link[turn][i], link[turn][i] + 6, sizeof link[turn][i] - 6);
      memmove(link[turn][i], link[turn][i] + strspn(link[turn][i], "0123456789"), 64);
      EQUAL(fstat(fd[i], &stat), 0);
      if (!turn)
        kinds[i] = stat.st_mode;
      EQUAL(stat.st_mode, kinds[i]);
      if (i == 1)
        EQUAL(OFFSET(fd[i]), 4096);
      if (S_ISDIR(stat.st_mode)) {
        EQUAL(faccessat(fd[i], "stat", F_OK, 0), -1);
      } else {
        EQUAL(read(fd[i], name, sizeof name), i == 1 ? 0 : -1);
        if (i != 1)
          EQUAL(errno, ESRCH);
      }
    }
    if (!turn)
      cut();
  }
  for (int i = 0; i < FILES; i++)
    if (i != 5)
      CHECK(!strcmp(link[0][i], link[1][i]));
}

// What is set of pipes and memory, and then otherwise when it is told to change that, before which it is brought back.
static void set_otherwise(void) {
  int ends[2], memory = memfd_create("set", MFD_ALLOW_SEALING);
  struct f_owner_ex own = {F_OWNER_PID, getpid()}, none = {F_OWNER_PID, 0}, is = {0};
  MUST(memory >= 0 && pipe(ends) == 0 && fcntl(ends[1], F_SETPIPE_SZ, 8192) == 8192 && fchmod(memory, 0640) == 0);
  MUST(fcntl(ends[0], F_SETOWN_EX, &own) == 0 && fcntl(ends[0], F_SETSIG, SIGUSR1) == 0 && write(ends[1], "kept", 4) == 4);
  int mixed[2]; // a packet, and bytes in none
  char back[8];
  MUST(pipe2(mixed, O_NONBLOCK | O_DIRECT) == 0 && write(mixed[1], "ab", 2) == 2 && fcntl(mixed[1], F_SETFL, O_NONBLOCK) == 0);
  MUST(write(mixed[1], "cdef", 4) == 4);
  ready();
  while (!gone()) {
    nap(0.002);
    if (access(path_of("change"), F_OK))
      continue;
    MUST(fcntl(ends[1], F_SETPIPE_SZ, 65536) == 65536 && fchmod(memory, 0600) == 0);
    MUST(fcntl(ends[0], F_SETOWN_EX, &none) == 0 && fcntl(ends[0], F_SETSIG, 0) == 0);
    MUST(read(mixed[0], back, 8) == 2 && read(mixed[0], back, 8) == 4 && fcntl(mixed[1], F_SETFL, O_NONBLOCK | O_DIRECT) == 0);
    close(open(path_of("changed"), O_CREAT | O_WRONLY, 0600));
    for (;;)
      pause();
  }
  struct stat s;
  EQUAL(fcntl(ends[1], F_GETPIPE_SZ), 8192);
  EQUAL(fcntl(ends[0], F_GETOWN_EX, &is), 0);
  EQUAL(is.type, F_OWNER_PID);
  EQUAL(is.pid, getpid());
  EQUAL(fcntl(ends[0], F_GETSIG), SIGUSR1);
  EQUAL(fstat(memory, &s), 0);
  EQUAL(s.st_mode & 07777, 0640);
  EQUAL(read(ends[0], back, sizeof back), 4);
  EQUAL(fcntl(mixed[1], F_GETFL) & O_DIRECT, 0);
  EQUAL(read(mixed[0], back, 1), 1);
  EQUAL(back[0], 'a');
  EQUAL(read(mixed[0], back, 2), 2);
  EQUAL(read(mixed[0], back + 2, 6), 2);
  CHECK(!memcmp(back, "cdef", 4));
}

static void many_descriptors(void) {
  int fd[900];
  close(create("shared-by-many", O_RDWR, "some text"));
  for (int i = 0; i < 900; i++) {
    MUST((fd[i] = open(path_of("shared-by-many"), i % 2 ? O_RDONLY : O_RDWR)) >= 0);
    lseek(fd[i], i % 9, SEEK_SET);
  }
  for (int i = 0; i < 900; i += 10)
    close(fd[i]);
  cut();
  for (int i = 0; i < 900; i++)
    EQUAL(OFFSET(fd[i]), i % 10 ? i % 9 : -1);
}

SCENARIOS({"regular", regular}, {"duplicates", duplicates}, {"deleted", deleted}, {"times", times}, {"directories", directories},
          {"pipes", pipes}, {"pipes_of_two_modes", pipes_of_two_modes}, {"owners", owners}, {"fifo", fifo}, {"fifo_in_common", fifo_in_common}, {"fifo_removed", fifo_removed}, {"fifo_left", fifo_left}, {"stream_pair", stream_pair}, {"credentials_pair", credentials_pair}, {"message_pairs", message_pairs},
          {"half_closed_pair", half_closed_pair}, {"listening_tcp4", listening_tcp4},
          {"listening_tcp6", listening_tcp6}, {"listening_unix", listening_unix}, {"file_attributes", file_attributes}, {"eventfds", eventfds},
          {"signalfds", signalfds}, {"epolls", epolls}, {"inotifys", inotifys}, {"watched_closely", watched_closely}, {"memfd_programs", memfd_programs}, {"lock_owner", lock_owner}, {"deleted_folders", deleted_folders}, {"shared_port", shared_port}, {"fanotifys", fanotifys}, {"pidfds", pidfds}, {"pidfds_unwaited", pidfds_unwaited}, {"ptys", ptys}, {"pty_modes", pty_modes}, {"hung_up", hung_up}, {"pty_unread", pty_unread}, {"leases", leases},
          {"devices", devices}, {"idle_devices", idle_devices}, {"locks", locks}, {"signal_driven", signal_driven}, {"proc_files", proc_files}, {"network_files", network_files}, {"ended_proc_files", ended_proc_files},
          {"many_descriptors", many_descriptors}, {"set_otherwise", set_otherwise})
