// Runs a command and kills it as it makes a system call: `kill_at REPORT N CALLS COMMAND [ARGUMENT]...`. CALLS are names of which those
// below are known, or `all`; N counts the calls of all of the command's threads together, and 0 kills at none. Processes that it makes are
// left alone. In the end REPORT has how many of these calls it made (the last of them was not made if it was killed at it), and its name.
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(x) \
  do { \
    if (!(x)) { \
      fprintf(stderr, "kill_at: %s: %s\n", #x, strerror(errno)); \
      exit(125); \
    } \
  } while (0)

static const struct {
  const char *name;
  long nr;
} known[] = {{"ptrace", SYS_ptrace},
             {"pidfd_send_signal", SYS_pidfd_send_signal},
             {"process_vm_writev", SYS_process_vm_writev},
             {"tgkill", SYS_tgkill},
             {"kill", SYS_kill},
             {"ioctl", SYS_ioctl},
             {"pwrite64", SYS_pwrite64},
             {"sendmsg", SYS_sendmsg}};
#define KNOWN (sizeof known / sizeof *known)

static int is_meant(const char *calls, long nr) {
  if (!strcmp(calls, "all"))
    return 1;
  for (size_t i = 0; i < KNOWN; i++)
    if (known[i].nr == nr)
      return strstr(calls, known[i].name) != NULL;
  return 0;
}

// A process of its own has another thread group.
static int is_thread_of(pid_t tid, pid_t pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/task/%d", pid, tid);
  return !access(path, F_OK);
}

int main(int argc, char **argv) {
  MUST(argc > 4);
  long n = atol(argv[2]), made = 0, last = -1;
  const char *calls = argv[3];
  int go[2];
  MUST(!pipe(go));
  pid_t pid = fork();
  MUST(pid >= 0);
  if (!pid) {
    char byte;
    close(go[1]);
    MUST(read(go[0], &byte, 1) == 1);
    close(go[0]);
    execvp(argv[4], argv + 4);
    _exit(127);
  }
  close(go[0]);
  MUST(!ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_TRACEEXEC));
  MUST(!ptrace(PTRACE_INTERRUPT, pid, 0, 0));
  MUST(write(go[1], "g", 1) == 1);
  close(go[1]);
  int status, end = -1;
  for (;;) {
    pid_t tid = waitpid(-1, &status, __WALL);
    if (tid < 0)
      break;
    if (WIFEXITED(status) || WIFSIGNALED(status)) {
      if (tid == pid)
        end = status;
      continue;
    }
    long signal = 0;
    int event = status >> 16;
    if (event == PTRACE_EVENT_STOP && !is_thread_of(tid, pid)) {
      ptrace(PTRACE_DETACH, tid, 0, 0);
      continue;
    }
    if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
      struct __ptrace_syscall_info info;
      if (ptrace(PTRACE_GET_SYSCALL_INFO, tid, sizeof info, &info) > 0 && info.op == PTRACE_SYSCALL_INFO_ENTRY &&
          is_meant(calls, (long)info.entry.nr)) {
        made++;
        last = (long)info.entry.nr;
        if (made == n)
          kill(pid, SIGKILL);
      }
    } else if (!event) {
      signal = WSTOPSIG(status);
    } else if (event == PTRACE_EVENT_STOP && WSTOPSIG(status) != SIGTRAP) {
      ptrace(PTRACE_LISTEN, tid, 0, 0); // stopped, as by job control
      continue;
    }
    ptrace(PTRACE_SYSCALL, tid, 0, signal);
  }
  const char *name = "another";
  for (size_t i = 0; i < KNOWN; i++)
    if (known[i].nr == last)
      name = known[i].name;
  FILE *report = fopen(argv[1], "w");
  MUST(report);
  MUST(fprintf(report, "%ld %s (%ld)\n", made, name, last) > 0);
  MUST(!fclose(report));
  return end >= 0 && WIFEXITED(end) ? WEXITSTATUS(end) : 137;
}
