// family DIRECTORY MEBIBYTES PROCESSES: a tree of processes that feel their own pauses.
//
// Each process has its part of the memory, wakes each millisecond, writes one of its pages, and notes how late it woke. At
// the end each checks its memory. The answer has two numbers, see `struct gaps`: the longest of any process.
#include "program.h"
#include <errno.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { MOST = 256, WORDS = 512, COUNTED = 7, MILLISECOND = 1000000 };

// What all processes see.
static struct family {
  struct gaps gaps[MOST];
  atomic_uint_least64_t beats[MOST];
  atomic_bool stop;
} *family;

static uint64_t *words;
static size_t pages;

static uint64_t expected(size_t word) { return mix(word + (uint64_t)getpid()) | 1; }

static void fill(void) {
  for (size_t i = 0; i < pages * WORDS; i++)
    words[i] = i % WORDS == COUNTED ? 0 : expected(i);
}

static bool is_intact(uint64_t writes) {
  uint64_t wrong = 0, counted = 0;
  for (size_t i = 0; i < pages * WORDS; i++) {
    if (i % WORDS == COUNTED)
      counted += words[i];
    else
      wrong += words[i] != expected(i);
  }
  return wrong == 0 && counted == writes;
}

static uint64_t beat(int index, uint64_t writes) {
  struct gaps *gaps = &family->gaps[index];
  uint64_t due = now() + MILLISECOND;
  struct timespec t = {(time_t)(due / 1000000000), (long)(due % 1000000000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
    ;
  words[mix(writes) % pages * WORDS + COUNTED]++;
  note_gap(gaps, now() - due);
  atomic_fetch_add(&family->beats[index], 1);
  return writes + 1;
}

static void begin(int index) {
  // Late by what stopped it, not by what the kernel may add to save power.
  prctl(PR_SET_TIMERSLACK, 1);
  fill();
  family->gaps[index].waited = time_waiting();
  atomic_store(&family->beats[index], 1);
}

static int work(int index) {
  pid_t parent = getppid();
  uint64_t writes = 0;
  begin(index);
  while (!atomic_load(&family->stop)) {
    if (getppid() != parent)
      return 1;
    writes = beat(index, writes);
  }
  return is_intact(writes) ? 0 : 1;
}

static bool have_all_beaten(const uint64_t *before, int processes) {
  for (int i = 1; i < processes; i++)
    if (atomic_load(&family->beats[i]) < before[i] + 2)
      return false;
  return true;
}

// What a process felt is known when it has woken.
static uint64_t wait_for_beats(int processes, uint64_t writes) {
  uint64_t before[MOST];
  for (int i = 0; i < processes; i++)
    before[i] = atomic_load(&family->beats[i]);
  do
    writes = beat(0, writes);
  while (!have_all_beaten(before, processes));
  return writes;
}

static void answer(int processes) {
  struct gaps all = {0};
  for (int i = 0; i < processes; i++) {
    keep_largest(&all.longest, atomic_exchange(&family->gaps[i].longest, 0));
    keep_largest(&all.stopped, atomic_exchange(&family->gaps[i].stopped, 0));
  }
  answer_gaps(&all);
}

int main(int count, char **arguments) {
  if (count < 4) {
    fprintf(stderr, "%s DIRECTORY MEBIBYTES PROCESSES\n", arguments[0]);
    return 2;
  }
  directory = arguments[1];
  int processes = atoi(arguments[3]);
  if (processes < 1 || processes > MOST)
    return 2;
  pages = (strtoul(arguments[2], NULL, 10) << 8) / (size_t)processes;
  if (pages == 0)
    return 2;
  family = mmap(NULL, sizeof *family, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (family == MAP_FAILED)
    die("mmap");
  // Made before the others are: each gets its own pages when it fills them.
  words = memory(pages * WORDS * sizeof *words);
  for (int i = 1; i < processes; i++) {
    pid_t child = fork();
    if (child < 0)
      die("fork");
    if (child == 0)
      _exit(work(i));
  }
  uint64_t writes = 0;
  begin(0);
  for (int i = 1; i < processes; i++)
    while (atomic_load(&family->beats[i]) == 0)
      pause_for(MILLISECOND);
  tell("ready", "%d\n", getpid());
  while (!exists("stop")) {
    if (asked()) {
      writes = wait_for_beats(processes, writes);
      answer(processes);
    }
    writes = beat(0, writes);
  }
  atomic_store(&family->stop, true);
  int intact = is_intact(writes), status;
  while (wait(&status) > 0)
    intact += WIFEXITED(status) && WEXITSTATUS(status) == 0;
  tell("result", "intact %d\nprocesses %d\nverdict %s\n", intact, processes, intact == processes ? "intact" : "wrong");
  return intact == processes ? 0 : 1;
}
