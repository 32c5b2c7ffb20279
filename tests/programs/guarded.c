// Guard regions come and go in memory that does not fit within a limit: what was guarded is zeros, what is guarded cannot be
// read, and all else is as it was: SEED STEPS.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096L
#define PAGES (40L << 8)
#define GUARDED (-1)
#define GUARD_INSTALL 102
#define GUARD_REMOVE 103

static char *arena;
static int model[PAGES];
static int ends[2];
static unsigned long x;

static unsigned long below(unsigned long n) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return x % n;
}

static void look(long page) {
    int got[1] = {0};
    // The kernel reads it: a guard is an error, and no signal.
    long n = write(ends[1], arena + page * PAGE, sizeof got);
    if (n == sizeof got && read(ends[0], got, sizeof got) != sizeof got) exit(2);
    int is = n < 0 && errno == EFAULT ? GUARDED : got[0];
    if (is != model[page]) {
        printf("page %ld is %d, and not %d\n", page, is, model[page]);
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc != 3 || pipe(ends)) return 2;
    x = 88172645463325252ul + atol(argv[1]);
    arena = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) return 2;
    for (long page = 0; page < PAGES; page++) *(int *)(arena + page * PAGE) = model[page] = 1 + below(1 << 30);
    for (long step = 0; step < atol(argv[2]); step++) {
        long at = below(PAGES - 40), count = 1 + below(40), end = at + count;
        switch (below(5)) {
        case 0:
            if (madvise(arena + at * PAGE, count * PAGE, GUARD_INSTALL)) return puts("no guards"), 77;
            for (; at < end; at++) model[at] = GUARDED;
            break;
        case 1:
        case 2:
            if (madvise(arena + at * PAGE, count * PAGE, GUARD_REMOVE)) return 2;
            for (; at < end; at++) model[at] = model[at] == GUARDED ? 0 : model[at];
            break;
        case 3:
            for (; at < end; at++)
                if (model[at] != GUARDED) *(int *)(arena + at * PAGE) = model[at] = 1 + below(1 << 30);
            break;
        default:
            for (; at < end; at++) look(at);
        }
    }
    for (long page = 0; page < PAGES; page++) look(page);
    puts("good");
    return 0;
}
