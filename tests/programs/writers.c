// Threads that write at random to memory of so many MiB; in the end a checksum of all of it is told.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static uint64_t *memory;
static size_t words;
static int threads;
static long steps;

static void *work(void *argument) {
    long number = (long)argument;
    uint64_t x = 88172645463325252ull + number * 7919;
    size_t part = words / threads;
    uint64_t *mine = memory + part * number;
    for (long i = 0; i < steps; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        mine[x % part] = mine[x % part] * 6364136223846793005ull + x;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    words = (size_t)atoi(argv[1]) << 17, threads = atoi(argv[2]), steps = atol(argv[3]);
    memory = mmap(0, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || threads > 64) return 2;
    for (size_t i = 0; i < words; i++) memory[i] = i * 2654435761u;
    pthread_t all[64];
    for (long i = 0; i < threads; i++) pthread_create(all + i, 0, work, (void *)i);
    for (int i = 0; i < threads; i++) pthread_join(all[i], 0);
    uint64_t sum = 0;
    for (size_t i = 0; i < words; i++) sum = (sum ^ memory[i]) * 1099511628211ull;
    printf("%016lx\n", sum);
    return 0;
}
