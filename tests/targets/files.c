// A program that writes a file before and after the cut, for what restore does with files that changed meanwhile.
#include "target.h"

static void write_lines(int fd, int from, int to) {
  for (int i = from; i < to; i++) {
    char line[32];
    int n = snprintf(line, sizeof line, "line %d\n", i);
    EQUAL(write(fd, line, n), n);
  }
}

static void writer(void) {
  int fd = open(path_of("data"), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  MUST(fd >= 0);
  write_lines(fd, 0, 1000);
  cut();
  write_lines(fd, 1000, 2000);
}

static void appender(void) {
  int fd = open(path_of("data"), O_WRONLY | O_CREAT | O_APPEND, 0644);
  MUST(fd >= 0);
  write_lines(fd, 0, 1000);
  cut();
  write_lines(fd, 1000, 2000);
}

// Goes on writing while it waits, so that the file grows past every checkpoint.
static void busy_writer(void) {
  int fd = open(path_of("data"), O_WRONLY | O_CREAT | O_TRUNC, 0644), i = 0;
  MUST(fd >= 0);
  ready();
  for (; i < 200 || !gone(); i++) {
    write_lines(fd, i, i + 1);
    nap(0.001);
  }
  say("lines %d", i);
  FILE *f = fopen(path_of("data"), "r");
  int n = 0, got = -1;
  while (fscanf(f, "line %d\n", &got) == 1)
    EQUAL(got, n++);
  EQUAL(n, i);
}

// Goes on writing through a mapping of all of a file, and knows what it has written.
static void busy_mapper(void) {
  enum { PAGES = 2048 };
  int fd = open(path_of("data"), O_RDWR | O_CREAT | O_TRUNC, 0644);
  MUST(fd >= 0 && !ftruncate(fd, PAGES * PAGE));
  long *p = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  MUST(p != MAP_FAILED);
  static long last[PAGES];
  ready();
  for (long i = 1; i < 200 || !gone(); i++) {
    long page = i * 37 % PAGES;
    last[page] = p[page * (PAGE / sizeof *p)] = p[1] = i;
    nap(0.001);
  }
  for (int i = 0; i < PAGES; i++)
    EQUAL(p[i * (PAGE / sizeof *p)], last[i]);
}

static void reader(void) {
  int fd = open(path_of("input"), O_RDONLY);
  MUST(fd >= 0);
  char c[8] = {0};
  MUST(read(fd, c, 4) == 4);
  cut();
  EQUAL(read(fd, c, 4), 4);
  CHECK(!memcmp(c, "4567", 4));
}

// Memory to make a checkpoint of some size: incompressible, verified at the end.
static void large(void) {
  size_t bytes = 32ul << 20;
  char *p = map_anon(bytes);
  fill(p, bytes, 77);
  cut();
  CHECK(filled(p, bytes, 77));
}

static void simple(void) {
  char *p = map_anon(16 * PAGE);
  fill(p, 16 * PAGE, 77);
  cut();
  CHECK(filled(p, 16 * PAGE, 77));
}

static void exits_with_7(void) {
  cut();
  _exit(7);
}

static void echoes(void) { // copies its input to its output line by line, until the end of the input
  ready();
  char line[256];
  while (fgets(line, sizeof line, stdin)) {
    printf("echo %s", line);
    fflush(stdout);
    if (!strcmp(line, "end\n"))
      return;
  }
}

static void killed_by_term(void) {
  ready();
  for (;;)
    pause();
}

SCENARIOS({"writer", writer}, {"appender", appender}, {"busy_writer", busy_writer},
          {"busy_mapper", busy_mapper}, {"reader", reader}, {"large", large}, {"simple", simple},
          {"exits_with_7", exits_with_7}, {"echoes", echoes}, {"killed_by_term", killed_by_term})
