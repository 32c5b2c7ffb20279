// Threads that write to memory in all the ways that there are, and never see a byte that is not what they wrote: MIB THREADS STEPS FILE.
//
// Lines of a page are of different threads, each as its number and a count of its versions tell; vectors lie across the borders of pages;
// what is added up, and what locks and conditions guard, is right in the end; files and pipes are read to pages, and written from them.
#define _GNU_SOURCE
#include <fcntl.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096L
#define MOST 16

struct guarded {
    pthread_mutex_t lock;
    pthread_cond_t turned;
    long count, turn, waited;
};

static long threads, steps, pages, lines;
static uint64_t *lines_at;         // a line of 64 bytes is of thread number % threads
static uint32_t *versions;         // of each line
static char *borders;              // vectors across the borders of these pages
static uint32_t *border_versions;
static _Atomic uint64_t *sums;     // one in each page
static char *guards;               // a struct guarded in each page
static char *buffers;              // 8 pages of each thread
static long guarded_by[MOST], added[MOST];
static int file, direct;

static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static void wrong(const char *what, long at, uint64_t is, uint64_t wanted) {
    printf("%s %ld is %lx, and not %lx\n", what, at, is, wanted);
    fflush(stdout);
    _exit(1);
}

static void check_line(long line) {
    for (int word = 0; word < 8; word++) {
        uint64_t wanted = versions[line] ? mixed(line * 8 + word + ((uint64_t)versions[line] << 40)) : 0;
        uint64_t is = lines_at[line * 8 + word];
        if (is != wanted) wrong("line", line, is, wanted);
    }
}

static void write_line(long line) {
    versions[line]++;
    for (int word = 0; word < 8; word++) lines_at[line * 8 + word] = mixed(line * 8 + word + ((uint64_t)versions[line] << 40));
}

__attribute__((target("avx2"))) static void border(long page, int is_write) {
    char *at = borders + (page + 1) * PAGE - 1 - page % 31;
    if (is_write) _mm256_storeu_si256((__m256i *)at, _mm256_set1_epi32((int)mixed(page + ((uint64_t)++border_versions[page] << 32))));
    __m256i is = _mm256_loadu_si256((__m256i *)at);
    int wanted = border_versions[page] ? (int)mixed(page + ((uint64_t)border_versions[page] << 32)) : 0;
    __m256i same = _mm256_cmpeq_epi32(is, _mm256_set1_epi32(wanted));
    if (_mm256_movemask_epi8(same) != -1) wrong("border", page, (uint32_t)_mm256_extract_epi32(is, 0), (uint32_t)wanted);
}

static void *work(void *argument) {
    long number = (long)argument, mine = lines / threads, own_borders = pages / threads;
    uint64_t x = mixed(number + 1);
    char *own = buffers + number * 8 * PAGE;
    int ends[2];
    if (pipe(ends)) exit(2);
    for (long step = 0; step < steps; step++) {
        x = mixed(x + step);
        long line = (long)((x >> 8) % mine) * threads + number;
        switch (x % 16) {
        case 0 ... 4:
            check_line(line);
            write_line(line);
            break;
        case 5 ... 7: // in order
            for (long at = line; at < lines && at < line + 400 * threads; at += threads) {
                check_line(at);
                if (x & 1 << 20) write_line(at);
            }
            break;
        case 8: { // each thread has every so many borders
            long page = (long)((x >> 8) % (own_borders - 1)) * threads + number;
            border(page, 0);
            border(page, 1);
            break;
        }
        case 9:
            sums[(x >> 8) % pages * (PAGE / 8)] += x >> 40;
            added[number] += x >> 40;
            break;
        case 10:
        case 11: {
            struct guarded *it = (struct guarded *)(guards + (x >> 8) % (pages / 4) * PAGE + 2048 - 64);
            pthread_mutex_lock(&it->lock);
            long count = it->count;
            if (x & 1 << 20) sched_yield();
            it->count = count + 1;
            pthread_cond_broadcast(&it->turned);
            pthread_mutex_unlock(&it->lock);
            guarded_by[number]++;
            break;
        }
        case 12: { // all meet at few: in turns, and whoever waits is woken
            struct guarded *it = (struct guarded *)(guards + (x >> 8) % 4 * (pages / 4 / 4) * PAGE + 2048 - 64);
            struct timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_nsec += 2000000;
            if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
            pthread_mutex_lock(&it->lock);
            it->count++, guarded_by[number]++;
            long turn = ++it->turn;
            while (it->turn == turn && !pthread_cond_timedwait(&it->turned, &it->lock, &until)) {}
            pthread_mutex_unlock(&it->lock);
            break;
        }
        case 13: { // a file, past the page cache or not, to a page, or across its border
            long at = (x >> 8) % 500, aligned = x >> 30 & 1;
            char *to = own + (aligned ? 0 : x >> 31 & 1023);
            memset(to, 0xee, PAGE);
            if (pread(aligned && direct >= 0 ? direct : file, to, PAGE, at * PAGE) != PAGE) exit(2);
            for (int word = 0; word < 512; word++) {
                uint64_t is;
                memcpy(&is, to + word * 8, 8);
                if (is != mixed(at * 512 + word)) wrong("file", at, is, mixed(at * 512 + word));
            }
            break;
        }
        case 14: { // a pipe
            char *from = own + 2 * PAGE + (x >> 8 & 4095), *to = own + 5 * PAGE + (x >> 20 & 4095);
            for (int i = 0; i < PAGE; i++) from[i] = x >> (i & 31);
            if (write(ends[1], from, PAGE) != PAGE) exit(2);
            if (x & 1 << 21) usleep(x >> 50);
            for (long got = 0, n; got < PAGE; got += n)
                if ((n = read(ends[0], to + got, PAGE - got)) <= 0) exit(2);
            if (memcmp(from, to, PAGE)) wrong("pipe", number, 0, 0);
            break;
        }
        default:
            if ((x >> 8) % 64 == 0) usleep(x >> 52);
            else sched_yield();
        }
    }
    return 0;
}

static void *room(long bytes) {
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(2);
    return at;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    if (!__builtin_cpu_supports("avx2")) return puts("no vectors"), 77;
    long bytes = atol(argv[1]) << 20;
    threads = atol(argv[2]), steps = atol(argv[3]);
    if (threads > MOST) return 2;
    lines = bytes / 64 / threads * threads, pages = bytes / PAGE / 4 / threads * threads;
    lines_at = room(bytes), versions = room(lines * 4);
    borders = room((pages + 2) * PAGE), border_versions = room(pages * 4);
    sums = room(pages * PAGE), guards = room(pages * PAGE), buffers = room(threads * 8 * PAGE);
    uint64_t words[512];
    file = open(argv[4], O_RDWR | O_CREAT | O_TRUNC, 0600);
    for (long at = 0; at < 500; at++) {
        for (int word = 0; word < 512; word++) words[word] = mixed(at * 512 + word);
        if (write(file, words, PAGE) != PAGE) return 2;
    }
    if (fsync(file)) return 2;
    direct = open(argv[4], O_RDONLY | O_DIRECT);
    for (long page = 0; page < pages / 4; page++) {
        struct guarded *it = (struct guarded *)(guards + page * PAGE + 2048 - 64);
        pthread_mutex_init(&it->lock, 0), pthread_cond_init(&it->turned, 0);
    }
    pthread_t all[MOST];
    for (long i = 0; i < threads; i++) pthread_create(all + i, 0, work, (void *)i);
    for (long i = 0; i < threads; i++) pthread_join(all[i], 0);
    for (long line = 0; line < lines; line++) check_line(line);
    for (long page = 0; page < pages - threads; page++) border(page, 0);
    uint64_t sum = 0, count = 0;
    for (long page = 0; page < pages; page++) sum += sums[page * (PAGE / 8)];
    for (long page = 0; page < pages / 4; page++) count += ((struct guarded *)(guards + page * PAGE + 2048 - 64))->count;
    for (long i = 0; i < threads; i++) sum -= added[i], count -= guarded_by[i];
    if (sum || count) wrong("sum", count, sum, 0);
    puts("good");
    return 0;
}
