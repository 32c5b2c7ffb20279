// Files and descriptors in states that are seldom thought of.
#include "target.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>

static void deleted_directory(void) { // to stand in, and open
  char name[4096];
  snprintf(name, sizeof name, "%s", path_of("gone"));
  MUST(mkdir(name, 0751) == 0 && chdir(name) == 0);
  int d = open(".", O_RDONLY | O_DIRECTORY);
  MUST(d >= 0 && rmdir(name) == 0);
  cut();
  char here[4096];
  EQUAL(syscall(SYS_getcwd, here, sizeof here) < 0, 1);
  EQUAL(errno, ENOENT);
  struct stat s, t;
  EQUAL(fstat(d, &s), 0);
  EQUAL(stat(".", &t), 0);
  EQUAL(s.st_ino, t.st_ino);
  EQUAL(s.st_nlink, 0);
  EQUAL(s.st_mode, S_IFDIR | 0751);
  EQUAL(openat(d, "file", O_CREAT | O_WRONLY, 0600), -1);
  EQUAL(access(name, F_OK), -1);
}

static void replaced(void) { // by another file of the same name
  char name[4096], other[4096];
  snprintf(name, sizeof name, "%s", path_of("replaced"));
  snprintf(other, sizeof other, "%s", path_of("other"));
  int fd = open(name, O_RDWR | O_CREAT, 0600), new = open(other, O_RDWR | O_CREAT, 0600);
  MUST(write(fd, "old", 3) == 3 && write(new, "new one", 7) == 7 && rename(other, name) == 0);
  cut();
  char c[8] = {0};
  EQUAL(pread(fd, c, 8, 0), 3);
  CHECK(!strcmp(c, "old"));
  EQUAL(pread(new, c, 8, 0), 7);
  struct stat s, t;
  EQUAL(fstat(new, &s), 0);
  EQUAL(stat(name, &t), 0);
  EQUAL(s.st_ino, t.st_ino);
}

static void renamed(void) { // while it was open
  char name[4096], other[4096];
  snprintf(name, sizeof name, "%s", path_of("before"));
  snprintf(other, sizeof other, "%s", path_of("after"));
  int fd = open(name, O_RDWR | O_CREAT, 0600);
  MUST(write(fd, "moved", 5) == 5 && rename(name, other) == 0);
  cut();
  EQUAL(write(fd, "on", 2), 2);
  struct stat s;
  EQUAL(stat(other, &s), 0);
  EQUAL(s.st_size, 7);
}

static void disarmed(void) { // watches that have fired, and wait to be armed again
  int e = epoll_create1(0), s[2], ends[2];
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0 && pipe(ends) == 0 && write(ends[1], "x", 1) == 1);
  struct epoll_event one = {.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 1}, got[4];
  struct epoll_event two = {.events = EPOLLOUT | EPOLLONESHOT | EPOLLET, .data.u64 = 2};
  MUST(epoll_ctl(e, EPOLL_CTL_ADD, ends[0], &one) == 0 && epoll_ctl(e, EPOLL_CTL_ADD, s[0], &two) == 0);
  MUST(epoll_wait(e, got, 4, 0) == 2);
  cut();
  EQUAL(epoll_wait(e, got, 4, 0), 0);
  close(s[1]);
  close(ends[1]); // hangs them up, of which disarmed watches say nothing
  EQUAL(epoll_wait(e, got, 4, 0), 0);
  EQUAL(epoll_ctl(e, EPOLL_CTL_MOD, ends[0], &one), 0);
  EQUAL(epoll_wait(e, got, 4, 0), 1);
  EQUAL(got[0].data.u64, 1);
  EQUAL(epoll_ctl(e, EPOLL_CTL_MOD, s[0], &two), 0);
  EQUAL(epoll_wait(e, got, 4, 0), 1);
  EQUAL(got[0].data.u64, 2);
}

static void edges(void) { // an edge that was taken is not told again
  int e = epoll_create1(0), v = eventfd(3, EFD_NONBLOCK);
  struct epoll_event edge = {.events = EPOLLIN | EPOLLET, .data.u64 = 9}, got[2];
  MUST(epoll_ctl(e, EPOLL_CTL_ADD, v, &edge) == 0 && epoll_wait(e, got, 2, 0) == 1);
  cut();
  uint64_t n = 1; // told once more after a restore, as the kernel does itself at any change: never lost
  int again = epoll_wait(e, got, 2, 0);
  CHECK(again == 0 || again == 1);
  EQUAL(write(v, &n, 8), 8);
  EQUAL(epoll_wait(e, got, 2, 0), 1);
  EQUAL(epoll_wait(e, got, 2, 0), 0);
}

static void nested_epolls(void) {
  int inner = epoll_create1(EPOLL_CLOEXEC), outer = epoll_create1(0), v = eventfd(0, EFD_NONBLOCK);
  struct epoll_event in = {.events = EPOLLIN, .data.u64 = 5}, out = {.events = EPOLLIN, .data.u64 = 6}, got[2];
  MUST(epoll_ctl(inner, EPOLL_CTL_ADD, v, &in) == 0 && epoll_ctl(outer, EPOLL_CTL_ADD, inner, &out) == 0);
  cut();
  EQUAL(epoll_wait(outer, got, 2, 0), 0);
  uint64_t n = 1;
  EQUAL(write(v, &n, 8), 8);
  EQUAL(epoll_wait(outer, got, 2, 0), 1);
  EQUAL(got[0].data.u64, 6);
  EQUAL(epoll_wait(inner, got, 2, 0), 1);
  EQUAL(got[0].data.u64, 5);
}

static void mapped_handle(void) { // a descriptor of shared anonymous memory
  char *p = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), name[100];
  fill(p, 4 * PAGE, 8);
  snprintf(name, sizeof name, "/proc/self/map_files/%lx-%lx", (long)p, (long)p + 4 * PAGE);
  int fd = open(name, O_RDWR);
  if (fd < 0)
    SKIP("not permitted to open what is mapped");
  cut();
  CHECK(filled(p, 4 * PAGE, 8));
  EQUAL(pwrite(fd, "shared", 6, 100), 6);
  CHECK(!memcmp(p + 100, "shared", 6));
}

static void views(void) { // of the kernel and of the program itself
  int a = open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY), b = open("/proc/self/status", O_RDONLY);
  char name[100], text[4096] = {0}, wanted[32];
  snprintf(name, sizeof name, "/proc/%d/task/%d/comm", getpid(), getpid());
  int c = open(name, O_RDWR), d = open("/proc/self", O_RDONLY | O_DIRECTORY);
  MUST(b >= 0 && c >= 0 && d >= 0 && read(b, text, 100) == 100);
  cut();
  EQUAL(write(c, "renamed", 7), 7);
  EQUAL(lseek(b, 0, SEEK_CUR), 100);
  EQUAL(lseek(b, 0, SEEK_SET), 0);
  CHECK(read(b, text, sizeof text - 1) > 100);
  CHECK(strstr(text, "Name:\trenamed"));
  snprintf(wanted, sizeof wanted, "Pid:\t%d\n", getpid());
  CHECK(strstr(text, wanted));
  CHECK(a < 0 || read(a, text, sizeof text) > 0);
  CHECK(openat(d, "status", O_RDONLY) >= 0);
}

static void bound(void) { // below a bind mount
  char from[4096], to[4096], name[8192];
  snprintf(from, sizeof from, "%s", path_of("from"));
  snprintf(to, sizeof to, "%s", path_of("to"));
  snprintf(name, sizeof name, "%s/file", to);
  MUST(mkdir(from, 0700) == 0 && mkdir(to, 0700) == 0);
  if (mount(from, to, 0, MS_BIND, 0))
    SKIP("not permitted to mount");
  int fd = open(name, O_RDWR | O_CREAT, 0600);
  MUST(fd >= 0 && write(fd, "bound", 5) == 5 && chdir(to) == 0);
  cut();
  EQUAL(write(fd, "!", 1), 1);
  struct stat s;
  EQUAL(stat("file", &s), 0);
  EQUAL(s.st_size, 6);
  MUST(chdir("/") == 0);
  close(fd);
  EQUAL(umount(to), 0);
}

SCENARIOS({"deleted_directory", deleted_directory}, {"replaced", replaced}, {"renamed", renamed}, {"disarmed", disarmed},
          {"edges", edges}, {"nested_epolls", nested_epolls}, {"mapped_handle", mapped_handle}, {"views", views},
          {"bound", bound})
