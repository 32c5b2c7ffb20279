// Threads that move, grow, shrink and unmap mappings at the same time, each to addresses that others have just left; each knows what is
// in its pages: THREADS STEPS.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAPPINGS 6
#define MOST 128
#define WORDS 512 // of a page

struct mapping {
    uint64_t *at, first;
    size_t pages;
};

static long steps;

static void check(struct mapping *it, size_t page, uint64_t wanted, const char *what) {
    uint64_t is = it->at[page * WORDS + 3];
    if (is == wanted) return;
    printf("page %zu of %zu %s: it is %lx, and not %lx\n", page, it->pages, what, is, wanted);
    fflush(stdout);
    _exit(1);
}

static void fill(struct mapping *it, size_t from) {
    for (size_t page = from; page < it->pages; page++) {
        check(it, page, 0, "is new");
        it->at[page * WORDS + 3] = it->first + page;
    }
}

static void *work(void *argument) {
    struct mapping all[MAPPINGS] = {0};
    uint64_t x = 88172645463325252ull + (long)argument * 7919;
    for (long step = 0; step < steps; step++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        struct mapping *it = all + (x >> 33) % MAPPINGS;
        size_t pages = 1 + (x >> 20) % MOST, before = it->pages;
        if (!it->at) {
            *it = (struct mapping){mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), x, pages};
            if (it->at == MAP_FAILED) exit(2);
            fill(it, 0);
            continue;
        }
        switch (x >> 50 & 3) {
        case 0:
            if (munmap(it->at, before * 4096)) exit(2);
            it->at = 0;
            continue;
        case 1:
        case 2:
            it->at = mremap(it->at, before * 4096, pages * 4096, MREMAP_MAYMOVE);
            if (it->at == MAP_FAILED) exit(2);
            it->pages = pages;
            fill(it, before);
        }
        for (size_t page = 0; page < it->pages; page++) check(it, page, it->first + page, "was written");
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    long threads = atol(argv[1]);
    steps = atol(argv[2]);
    pthread_t all[64];
    if (threads > 64) return 2;
    for (long i = 0; i < threads; i++) pthread_create(all + i, 0, work, (void *)i);
    for (long i = 0; i < threads; i++) pthread_join(all[i], 0);
    puts("good");
    return 0;
}
