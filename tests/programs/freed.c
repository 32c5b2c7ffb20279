// Memory that is freed lazily, and taken back by the kernel at any moment, for which a child sees to: STEPS.
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096L
#define PAGES (24L << 8)

static char *arena;
static unsigned model[PAGES];
static char may_be_zero[PAGES];

static void take_back(pid_t parent) {
    struct iovec all = {arena, PAGES * PAGE};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int handle = syscall(SYS_pidfd_open, parent, 0);
    while (getppid() == parent) {
        syscall(SYS_process_madvise, handle, &all, 1, MADV_PAGEOUT, 0);
        usleep(50);
    }
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    unsigned long x = 88172645463325252ul;
    arena = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) return 2;
    pid_t parent = getpid(), child = fork();
    if (child == 0) take_back(parent);
    for (long page = 0; page < PAGES; page++) *(unsigned *)(arena + page * PAGE) = model[page] = page + 1;
    for (long step = 0; step < atol(argv[1]); step++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        long at = x % (PAGES - 64), end = at + 1 + (x >> 40) % 64;
        if (x >> 50 & 1) {
            if (madvise(arena + at * PAGE, (end - at) * PAGE, MADV_FREE)) return 2;
            memset(may_be_zero + at, 1, end - at);
        } else if (x >> 51 & 1) {
            for (; at < end; at++) *(unsigned *)(arena + at * PAGE) = model[at] = x >> 3 | 1, may_be_zero[at] = 0;
        }
        for (; at < end; at++) {
            unsigned is = *(volatile unsigned *)(arena + at * PAGE);
            if (is == 0 && may_be_zero[at]) model[at] = 0;
            if (is != model[at]) return printf("page %ld is %x, and not %x\n", at, is, model[at]), 1;
        }
    }
    kill(child, SIGKILL);
    puts("good");
    return 0;
}
