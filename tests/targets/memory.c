// Memory: every kind of mapping, its contents, its flags, and how it behaves after the cut.
#include "target.h"
#include <setjmp.h>
#include <sys/prctl.h>
#include <sys/resource.h>

// Some values are newer than some C libraries.
#define GUARD_INSTALL 102
#define GUARD_REMOVE 103
#define MIB (1ul << 20)

static sigjmp_buf escape;
static volatile int fault_signal;

static void on_fault(int s) {
  fault_signal = s;
  siglongjmp(escape, 1);
}

static void catch_faults(void) {
  signal(SIGSEGV, on_fault);
  signal(SIGBUS, on_fault);
}

// The signal that reading (or writing) a byte raises; 0: none.
static int fault_of(volatile char *at, int write) {
  fault_signal = 0;
  if (!sigsetjmp(escape, 1)) {
    if (write)
      *at = 1;
    else
      (void)*at;
  }
  return fault_signal;
}

static int file_of(const char *name, size_t bytes, uint64_t seed) {
  int fd = open(path_of(name), O_RDWR | O_CREAT | O_TRUNC, 0600);
  MUST(fd >= 0);
  char *data = malloc(bytes);
  fill(data, bytes, seed);
  MUST(write(fd, data, bytes) == (ssize_t)bytes);
  free(data);
  return fd;
}

static void anonymous(void) {
  char *rw = map_anon(4 * MIB), *ro = map_anon(MIB), *holes = map_anon(4 * MIB);
  fill(rw, 4 * MIB, 1);
  fill(ro, MIB, 2);
  MUST(mprotect(ro, MIB, PROT_READ) == 0);
  for (size_t i = 0; i < 4 * MIB; i += 7 * PAGE)
    fill(holes + i, PAGE, i);
  char *heap = malloc(200000);
  fill(heap, 200000, 4);
  cut();
  CHECK(filled(rw, 4 * MIB, 1));
  CHECK(filled(ro, MIB, 2));
  for (size_t i = 0; i < 4 * MIB; i += PAGE)
    CHECK(i % (7 * PAGE) ? all_zero(holes + i, PAGE) : filled(holes + i, PAGE, i));
  CHECK(filled(heap, 200000, 4));
  catch_faults();
  EQUAL(fault_of(ro, 1), SIGSEGV);
  fill(rw, 4 * MIB, 9);
  CHECK(filled(rw, 4 * MIB, 9));
}

static void private_file(void) {
  int fd = file_of("mapped", 64 * PAGE, 7);
  char *p = mmap(0, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  char *part = mmap(0, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 16 * PAGE);
  MUST(p != MAP_FAILED && part != MAP_FAILED);
  close(fd);
  for (int i = 0; i < 64; i += 3)
    fill(p + i * PAGE, PAGE, 1000 + i);
  part[0] = 42;
  memset(p + 30 * PAGE, 0, PAGE); // a modified page may well be all zeros
  cut();
  for (int i = 0; i < 64; i++)
    if (i == 30)
      CHECK(all_zero(p + i * PAGE, PAGE));
    else
      CHECK(filled(p + i * PAGE, PAGE, i % 3 ? 7 + i * 512 : 1000 + i));
  EQUAL(part[0], 42);
  CHECK(filled(part + PAGE, 7 * PAGE, 7 + 17 * 512));
  // Still a mapping of the file: dropped pages come back from it.
  EQUAL(madvise(p, PAGE, MADV_DONTNEED), 0);
  CHECK(filled(p, PAGE, 7));
}

static void shared_file(void) {
  int fd = file_of("shared", 64 * PAGE, 7);
  char *p = mmap(0, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  char *q = mmap(0, 4 * PAGE, PROT_READ, MAP_SHARED, fd, 8 * PAGE);
  MUST(p != MAP_FAILED && q != MAP_FAILED);
  for (int i = 0; i < 64; i += 5)
    fill(p + i * PAGE, PAGE, 1000 + i);
  cut();
  char page[PAGE];
  for (int i = 0; i < 64; i++) {
    CHECK(filled(p + i * PAGE, PAGE, i % 5 ? 7 + i * 512 : 1000 + i));
    EQUAL(pread(fd, page, PAGE, i * PAGE), PAGE);
    CHECK(!memcmp(page, p + i * PAGE, PAGE));
  }
  p[9 * PAGE] = 77;
  EQUAL(q[PAGE], 77);
  p[63 * PAGE] = 78;
  EQUAL(pread(fd, page, 1, 63 * PAGE), 1);
  EQUAL(page[0], 78);
}

static void shared_anonymous(void) {
  char *p = mmap(0, 32 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  MUST(p != MAP_FAILED);
  fill(p, 32 * PAGE, 3);
  char *q = mremap(p, 0, 32 * PAGE, MREMAP_MAYMOVE); // a second mapping of the same memory
  char *r = mremap(p + 8 * PAGE, 0, 4 * PAGE, MREMAP_MAYMOVE);
  MUST(q != MAP_FAILED && r != MAP_FAILED);
  MUST(mprotect(r, 4 * PAGE, PROT_READ) == 0);
  cut();
  CHECK(filled(p, 32 * PAGE, 3));
  CHECK(filled(q, 32 * PAGE, 3));
  fill(p + 9 * PAGE, PAGE, 99);
  CHECK(filled(q + 9 * PAGE, PAGE, 99));
  CHECK(filled(r + PAGE, PAGE, 99));
  // And shared with a child.
  pid_t child = fork();
  if (child == 0) {
    p[0] = 5;
    _exit(0);
  }
  waitpid(child, 0, 0);
  EQUAL(q[0], 5);
}

// A private mapping of shared anonymous memory, by way of its mapping: what is not its own it has from there, also later.
static void private_of_shared(void) {
  char *shared = mmap(0, 5 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), path[80];
  MUST(shared != MAP_FAILED);
  fill(shared, 2 * PAGE, 1);
  snprintf(path, sizeof path, "/proc/self/map_files/%lx-%lx", (long)shared, (long)(shared + 5 * PAGE));
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0)
    SKIP("mappings cannot be opened here");
  char *own = mmap(0, 5 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  MUST(own != MAP_FAILED && !close(fd));
  fill(own + PAGE, PAGE, 2);
  cut();
  CHECK(filled(own, PAGE, 1) && filled(own + PAGE, PAGE, 2));
  fill(shared, PAGE, 3);
  fill(shared + 3 * PAGE, PAGE, 4);
  CHECK(filled(own, PAGE, 3) && filled(own + PAGE, PAGE, 2) && filled(own + 3 * PAGE, PAGE, 4));
}

static void memfd_twice(void) {
  int fd = syscall(SYS_memfd_create, "notes", 2 /* MFD_ALLOW_SEALING */);
  MUST(fd >= 0 && ftruncate(fd, 40 * PAGE) == 0);
  char *p = mmap(0, 32 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  char *q = mmap(0, 16 * PAGE, PROT_READ, MAP_SHARED, fd, 8 * PAGE);
  char *private = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  MUST(p != MAP_FAILED && q != MAP_FAILED && private != MAP_FAILED);
  fill(p, 32 * PAGE, 3);
  private[PAGE] = 11;
  MUST(lseek(fd, 12345, SEEK_SET) == 12345);
  MUST(fcntl(fd, 1033, 2) == 0); // F_ADD_SEALS, F_SEAL_SHRINK
  cut();
  CHECK(filled(p, 32 * PAGE, 3));
  CHECK(filled(q, 16 * PAGE, 3 + 8 * 512));
  CHECK(filled(private, PAGE, 3));
  EQUAL(private[PAGE], 11);
  EQUAL(lseek(fd, 0, SEEK_CUR), 12345);
  struct stat s;
  EQUAL(fstat(fd, &s), 0);
  EQUAL(s.st_size, 40 * PAGE);
  EQUAL(fcntl(fd, 1034), 2);
  EQUAL(ftruncate(fd, PAGE), -1);
  p[8 * PAGE] = 77;
  EQUAL(q[0], 77);
  EQUAL(pwrite(fd, "Z", 1, 9 * PAGE), 1);
  EQUAL(q[PAGE], 'Z');
}

static void memfd_closed(void) { // mapped, and no descriptor left
  int fd = syscall(SYS_memfd_create, "gone", 1);
  MUST(fd >= 0 && ftruncate(fd, 8 * PAGE) == 0);
  char *p = mmap(0, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  char *q = mmap(0, 8 * PAGE, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  fill(p, 8 * PAGE, 3);
  cut();
  CHECK(filled(q, 8 * PAGE, 3));
  p[0] = 7;
  EQUAL(q[0], 7);
}

// Mapped from a descriptor for reading, or when a seal forbade writing: it can never be made writable, and does not stand in the way of a seal.
static void never_written(void) {
  int plain = syscall(SYS_memfd_create, "plain", 2), sealed = syscall(SYS_memfd_create, "sealed", 2);
  int file = file_of("read", PAGE, 2), gone = file_of("gone", PAGE, 3);
  MUST(plain >= 0 && sealed >= 0 && ftruncate(plain, PAGE) == 0 && ftruncate(sealed, PAGE) == 0);
  MUST(pwrite(sealed, "s", 1, 5) == 1 && fcntl(sealed, 1033, 8) == 0); // F_ADD_SEALS, F_SEAL_WRITE
  int all[] = {plain, file, gone, sealed};
  char *maps[COUNT(all)];
  for (size_t i = 0; i < COUNT(all); i++) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", all[i]);
    int fd = i == 3 ? all[i] : open(name, O_RDONLY);
    MUST(fd >= 0);
    maps[i] = mmap(0, PAGE, PROT_READ, MAP_SHARED, fd, 0);
    if (i == 3 && maps[i] == MAP_FAILED)
      SKIP("this kernel does not map what is sealed (Linux 6.7)");
    MUST(maps[i] != MAP_FAILED);
    if (i < 3)
      close(fd);
  }
  MUST(unlink(path_of("gone")) == 0);
  cut();
  for (size_t i = 0; i < COUNT(all); i++) {
    EQUAL(mprotect(maps[i], PAGE, PROT_READ | PROT_WRITE), -1);
    EQUAL(errno, EACCES);
    EQUAL(pwrite(all[i], "w", 1, 5), i < 3 ? 1 : -1);
    EQUAL(maps[i][5], i < 3 ? 'w' : 's');
  }
  EQUAL(fcntl(plain, 1033, 8), 0); // F_SEAL_WRITE
}

static void deleted_file(void) {
  int fd = file_of("deleted", 16 * PAGE, 7);
  char *p = mmap(0, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  char *q = mmap(0, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  MUST(p != MAP_FAILED && q != MAP_FAILED);
  MUST(unlink(path_of("deleted")) == 0);
  p[PAGE] = 1;
  q[2 * PAGE] = 2;
  cut();
  EQUAL(p[PAGE], 1);
  EQUAL(q[2 * PAGE], 2);
  EQUAL(q[PAGE], 1);
  CHECK(filled(p + 3 * PAGE, 13 * PAGE, 7 + 3 * 512));
  CHECK(filled(q + 3 * PAGE, 13 * PAGE, 7 + 3 * 512));
  struct stat s;
  EQUAL(fstat(fd, &s), 0);
  EQUAL(s.st_nlink, 0);
  EQUAL(s.st_size, 16 * PAGE);
  p[5 * PAGE] = 55;
  char c = 0;
  EQUAL(pread(fd, &c, 1, 5 * PAGE), 1);
  EQUAL(c, 55);
}

static void beyond_the_end(void) { // pages behind the end of the file raise SIGBUS, before and after
  int fd = file_of("short", 2 * PAGE + 100 * 8, 7);
  char *p = mmap(0, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  char *q = mmap(0, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  MUST(p != MAP_FAILED && q != MAP_FAILED);
  p[2 * PAGE + 50] = 5;
  p[2 * PAGE + 3000] = 6; // in the last page, behind the end
  cut();
  EQUAL(p[2 * PAGE + 50], 5);
  EQUAL(p[2 * PAGE + 3000], 6);
  CHECK(filled(p, 2 * PAGE, 7));
  catch_faults();
  EQUAL(fault_of(p + 3 * PAGE, 0), SIGBUS);
  EQUAL(fault_of(q + 3 * PAGE, 0), SIGBUS);
  EQUAL(ftruncate(fd, 16 * PAGE), 0);
  EQUAL(fault_of(q + 3 * PAGE, 1), 0);
}

// --- stacks

static int dive(int levels) {
  volatile char room[8000];
  room[0] = levels;
  room[7999] = levels;
  if (levels == 0)
    return 0;
  int sum = dive(levels - 1) + 1;
  return room[0] == (char)levels && room[7999] == (char)levels ? sum : -1000000;
}

static void stack_growth(void) {
  volatile char kept[20000];
  for (int i = 0; i < 20000; i++)
    kept[i] = i * 7;
  dive(20);
  cut();
  for (int i = 0; i < 20000; i++)
    if (kept[i] != (char)(i * 7)) {
      CHECK(!"stack contents kept");
      break;
    }
  EQUAL(dive(700), 700); // 5.6 MB
}

static void grows_down(void) {
  char *room = map_anon(512 * PAGE);
  munmap(room, 512 * PAGE);
  char *low = mmap(room + 400 * PAGE, 4 * PAGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_GROWSDOWN, -1, 0);
  MUST(low != MAP_FAILED);
  fill(low, 4 * PAGE, 5);
  low[-10] = 3; // grows by a page
  cut();
  CHECK(filled(low, 4 * PAGE, 5));
  EQUAL(low[-10], 3);
  catch_faults();
  for (int i = 1; i < 20; i++)
    EQUAL(fault_of(low - i * (long)PAGE, 1), 0);
}

// --- heap

static void heap_growth(void) {
  char *start = sbrk(0);
  MUST(sbrk(40 * PAGE) == (void *)start);
  fill((void *)(((uintptr_t)start + 7) & ~7ul), 30 * PAGE, 8);
  cut();
  CHECK(filled((void *)(((uintptr_t)start + 7) & ~7ul), 30 * PAGE, 8));
  char *end = sbrk(0);
  EQUAL(end - start, 40 * PAGE);
  CHECK(sbrk(300 * PAGE) == (void *)end);
  fill((void *)(((uintptr_t)end + 7) & ~7ul), 299 * PAGE, 9);
  CHECK(sbrk(0) == (void *)(end + 300 * PAGE));
  CHECK(sbrk(-300 * (long)PAGE) == (void *)(end + 300 * PAGE));
  char *maps = contents("/proc/self/maps", 0);
  CHECK(strstr(maps, "[heap]"));
  CHECK(strstr(maps, "[stack]"));
  CHECK(strstr(maps, "[vdso]"));
  free(maps);
  for (int i = 0; i < 1000; i++)
    free(malloc(i * 100));
}

// --- protections

static void guards(void) {
  char *p = map_anon(64 * PAGE);
  fill(p, 64 * PAGE, 1);
  if (madvise(p + 8 * PAGE, 2 * PAGE, GUARD_INSTALL))
    SKIP("this kernel has no guard regions");
  char *fresh = map_anon(1024 * PAGE);
  MUST(madvise(fresh, PAGE, GUARD_INSTALL) == 0);
  MUST(madvise(fresh + 600 * PAGE, 100 * PAGE, GUARD_INSTALL) == 0);
  fresh[512 * PAGE] = 1;
  cut();
  catch_faults();
  for (int i = 0; i < 64; i++)
    EQUAL(fault_of(p + i * PAGE, i & 1), i == 8 || i == 9 ? SIGSEGV : 0);
  for (int i = 0; i < 1024; i++)
    EQUAL(fault_of(fresh + i * PAGE, i & 1), i == 0 || (i >= 600 && i < 700) ? SIGSEGV : 0);
  CHECK(filled(p + 10 * PAGE, PAGE, 1 + 10 * 512));
  EQUAL(madvise(p + 8 * PAGE, PAGE, GUARD_REMOVE), 0);
  EQUAL(fault_of(p + 8 * PAGE, 0), 0);
  CHECK(all_zero(p + 8 * PAGE, PAGE));
  EQUAL(fault_of(p + 9 * PAGE, 0), SIGSEGV);
}

static void guards_in_file(void) {
  int fd = file_of("guarded", 16 * PAGE, 7);
  char *p = mmap(0, 16 * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
  if (madvise(p + 4 * PAGE, PAGE, GUARD_INSTALL))
    SKIP("this kernel has no guard regions in file mappings");
  cut();
  catch_faults();
  for (int i = 0; i < 16; i++)
    EQUAL(fault_of(p + i * PAGE, 0), i == 4 ? SIGSEGV : 0);
}

static void no_access(void) {
  char *p = map_anon(16 * PAGE);
  fill(p, 16 * PAGE, 6);
  MUST(mprotect(p, 8 * PAGE, PROT_NONE) == 0);
  char *reserved = mmap(0, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  MUST(reserved != MAP_FAILED);
  int fd = file_of("hidden", 4 * PAGE, 7);
  char *f = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  f[PAGE] = 1;
  MUST(mprotect(f, 4 * PAGE, PROT_NONE) == 0);
  cut();
  catch_faults();
  EQUAL(fault_of(p, 0), SIGSEGV);
  EQUAL(fault_of(f, 0), SIGSEGV);
  EQUAL(fault_of(reserved + 12345, 0), SIGSEGV);
  EQUAL(mprotect(p, 8 * PAGE, PROT_READ), 0);
  CHECK(filled(p, 16 * PAGE, 6));
  EQUAL(mprotect(f, 4 * PAGE, PROT_READ), 0);
  EQUAL(f[PAGE], 1);
  CHECK(filled(f + 2 * PAGE, PAGE, 7 + 2 * 512));
  EQUAL(mprotect(reserved, PAGE, PROT_READ | PROT_WRITE), 0);
  CHECK(all_zero(reserved, PAGE));
}

static const unsigned char return_42[] = {0xb8, 42, 0, 0, 0, 0xc3}, return_43[] = {0xb8, 43, 0, 0, 0, 0xc3};

static void executable_only(void) {
  char *x = map_anon(PAGE), *rwx = map_anon(PAGE), *w = map_anon(PAGE);
  memcpy(x, return_42, sizeof return_42);
  memcpy(rwx, return_42, sizeof return_42);
  fill(w, PAGE, 3);
  MUST(mprotect(x, PAGE, PROT_EXEC) == 0);
  MUST(mprotect(rwx, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
  MUST(mprotect(w, PAGE, PROT_WRITE) == 0);
  int (*call_x)(void) = (int (*)(void))x, (*call_rwx)(void) = (int (*)(void))rwx;
  cut();
  EQUAL(call_x(), 42);
  EQUAL(call_rwx(), 42);
  memcpy(rwx, return_43, sizeof return_43);
  EQUAL(call_rwx(), 43);
  EQUAL(mprotect(w, PAGE, PROT_READ), 0);
  CHECK(filled(w, PAGE, 3));
}

static void protection_keys(void) {
  int key = syscall(SYS_pkey_alloc, 0, 0);
  if (key < 0)
    SKIP("this processor has no protection keys");
  int other = syscall(SYS_pkey_alloc, 0, 2); // write disabled
  char *p = map_anon(4 * PAGE), *q = map_anon(4 * PAGE);
  fill(p, 4 * PAGE, 1);
  fill(q, 4 * PAGE, 2);
  MUST(syscall(SYS_pkey_mprotect, p, 4 * PAGE, PROT_READ | PROT_WRITE, key) == 0);
  MUST(syscall(SYS_pkey_mprotect, q, 4 * PAGE, PROT_READ | PROT_WRITE, other) == 0);
  uint32_t before, after, zero = 0;
  __asm__ volatile("rdpkru" : "=a"(before) : "c"(zero) : "rdx");
  before |= 1u << (2 * key); // no access
  __asm__ volatile("wrpkru" ::"a"(before), "c"(zero), "d"(zero));
  cut();
  __asm__ volatile("rdpkru" : "=a"(after) : "c"(zero) : "rdx");
  EQUAL(after, before);
  catch_faults();
  EQUAL(fault_of(p, 0), SIGSEGV);
  __asm__ volatile("wrpkru" ::"a"(before), "c"(zero), "d"(zero)); // a handler runs with its own
  EQUAL(fault_of(q, 0), 0);
  EQUAL(fault_of(q, 1), SIGSEGV);
  __asm__ volatile("wrpkru" ::"a"(0), "c"(zero), "d"(zero));
  CHECK(filled(p, 4 * PAGE, 1));
  CHECK(filled(q, 4 * PAGE, 2));
  int third = syscall(SYS_pkey_alloc, 0, 0);
  CHECK(third > 0 && third != key && third != other); // both are still taken
  EQUAL(syscall(SYS_pkey_free, key), 0);
}

// --- flags

// The VmFlags of the mapping that begins at an address, besides those that tell that somebody follows it.
static char *flags_at(void *address) {
  char *all = contents("/proc/self/smaps", 0), start[32], *flags = 0;
  snprintf(start, sizeof start, "\n%lx-", (unsigned long)(uintptr_t)address);
  char *at = strncmp(all, start + 1, strlen(start + 1)) ? strstr(all, start) : all;
  if (at && (at = strstr(at, "VmFlags:")))
    flags = strndup(at, strcspn(at, "\n"));
  free(all);
  for (int i = 0; flags && i < 2; i++) {
    char *own = strstr(flags, i ? " um" : " uw");
    if (own)
      memmove(own, own + 3, strlen(own + 3) + 1);
  }
  return flags ? flags : strdup("none");
}

// A mapping that merges with no neighbour, so that flags_at finds it.
static char *map_apart(size_t bytes) {
  char *p = map_anon(bytes + 2 * PAGE);
  MUST(mprotect(p, PAGE, PROT_NONE) == 0);
  MUST(mprotect(p + bytes + PAGE, PAGE, PROT_NONE) == 0);
  return p + PAGE;
}

static const int advices[] = {MADV_DONTFORK, MADV_DONTDUMP,  18 /* WIPEONFORK */, 12 /* MERGEABLE */,
                              14 /* HUGEPAGE */, 15 /* NOHUGEPAGE */, MADV_SEQUENTIAL,    MADV_RANDOM};

static void advice(void) {
  char *p[COUNT(advices) + 1], *before[COUNT(advices) + 1];
  for (size_t i = 0; i <= COUNT(advices); i++) {
    p[i] = map_apart(32 * PAGE);
    fill(p[i], 32 * PAGE, i);
    if (i < COUNT(advices) && madvise(p[i], 32 * PAGE, advices[i]))
      say("note: advice %d: %s", advices[i], strerror(errno));
  }
  MUST(madvise(p[COUNT(advices)], 32 * PAGE, MADV_DONTFORK) == 0); // several at once
  MUST(madvise(p[COUNT(advices)], 32 * PAGE, MADV_DONTDUMP) == 0);
  MUST(madvise(p[COUNT(advices)], 32 * PAGE, MADV_RANDOM) == 0);
  for (size_t i = 0; i <= COUNT(advices); i++)
    before[i] = flags_at(p[i]);
  cut();
  for (size_t i = 0; i <= COUNT(advices); i++) {
    char *after = flags_at(p[i]);
    if (strcmp(before[i], after)) {
      say("advice %d: %s, expected %s", i < COUNT(advices) ? advices[i] : -1, after, before[i]);
      CHECK(!"flags kept");
    }
    CHECK(filled(p[i], 32 * PAGE, i));
  }
}

static void locked(void) {
  char *p = map_apart(8 * PAGE), *q = map_apart(8 * PAGE);
  fill(p, 8 * PAGE, 1);
  MUST(mlock(p, 4 * PAGE) == 0);
  if (syscall(SYS_mlock2, q, 8 * PAGE, 1)) // on fault
    say("note: mlock2: %s", strerror(errno));
  char *before_p = flags_at(p), *before_q = flags_at(q), *before_rest = flags_at(p + 4 * PAGE);
  CHECK(strstr(before_p, " lo"));
  cut();
  char *after_p = flags_at(p), *after_q = flags_at(q), *after_rest = flags_at(p + 4 * PAGE);
  if (strcmp(before_p, after_p) || strcmp(before_q, after_q) || strcmp(before_rest, after_rest)) {
    say("%s / %s / %s, expected %s / %s / %s", after_p, after_q, after_rest, before_p, before_q, before_rest);
    CHECK(!"flags kept");
  }
  CHECK(filled(p, 8 * PAGE, 1));
}

static void lock_future(void) {
  MUST(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
  char *p = map_apart(8 * PAGE);
  cut();
  CHECK(strstr(flags_at(p), " lo"));
  CHECK(strstr(flags_at(map_apart(4 * PAGE)), " lo"));
  EQUAL(munlockall(), 0);
}

static void named(void) {
  char *p = map_anon(4 * PAGE);
  if (prctl(0x53564d41 /* PR_SET_VMA */, 0, p, 4 * PAGE, "my cache"))
    SKIP("this kernel names no anonymous mappings");
  cut();
  char *maps = contents("/proc/self/maps", 0);
  CHECK(strstr(maps, "[anon:my cache]"));
  free(maps);
}

// --- sizes

static void sparse(void) {
  size_t size = 1ul << 40;
  char *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    SKIP("no terabyte of address space here");
  for (uint64_t i = 0; i < 40; i++)
    fill(p + mix(i) % (size / PAGE) * PAGE, PAGE, i);
  cut();
  for (uint64_t i = 0; i < 40; i++)
    CHECK(filled(p + mix(i) % (size / PAGE) * PAGE, PAGE, i));
  CHECK(all_zero(p + mix(1000) % (size / PAGE) * PAGE, PAGE));
}

static void zeros(void) {
  char *read_only = map_anon(256 * PAGE), *written = map_anon(256 * PAGE);
  volatile char sum = 0;
  for (int i = 0; i < 256; i++)
    sum += read_only[i * PAGE]; // maps the shared page of zeros
  memset(written, 0, 256 * PAGE);
  written[100 * PAGE] = 1;
  cut();
  CHECK(all_zero(read_only, 256 * PAGE));
  CHECK(all_zero(written, 100 * PAGE));
  CHECK(all_zero(written + 101 * PAGE, 155 * PAGE));
  EQUAL(written[100 * PAGE], 1);
  fill(read_only, 256 * PAGE, 1);
  CHECK(filled(read_only, 256 * PAGE, 1));
}

#define SMALL 31000

static void many_mappings(void) {
  char *p = map_anon(SMALL * PAGE);
  for (long i = 0; i < SMALL; i++)
    *(long *)(p + i * PAGE) = i;
  for (long i = 0; i < SMALL; i += 2)
    MUST(mprotect(p + i * PAGE, PAGE, PROT_READ) == 0);
  cut();
  for (long i = 0; i < SMALL; i++)
    if (*(long *)(p + i * PAGE) != i) {
      EQUAL(*(long *)(p + i * PAGE), i);
      break;
    }
  catch_faults();
  for (long i = 0; i < SMALL; i += 997)
    EQUAL(fault_of(p + i * PAGE, 1), i % 2 ? 0 : SIGSEGV);
}

static void fixed_places(void) {
  char *low = mmap((void *)0x10000, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  char *high = mmap((void *)0x7ffffffde000, PAGE, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | 0x100000 /* MAP_FIXED_NOREPLACE */, -1, 0);
  MUST(low != MAP_FAILED);
  low[0] = 1;
  if (high != MAP_FAILED)
    high[0] = 2;
  cut();
  EQUAL(low[0], 1);
  if (high != MAP_FAILED)
    EQUAL(high[0], 2);
}

static void huge_pages(void) {
  char *p = mmap(0, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | 0x40000 /* MAP_HUGETLB */, -1, 0);
  if (p == MAP_FAILED)
    SKIP("no huge pages are set aside here (vm.nr_hugepages)");
  fill(p, 2 * MIB, 1);
  char *shared = mmap(0, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | 0x40000, -1, 0);
  if (shared != MAP_FAILED)
    fill(shared, 2 * MIB, 2);
  char *before = flags_at(p);
  cut();
  CHECK(filled(p, 2 * MIB, 1));
  if (shared != MAP_FAILED)
    CHECK(filled(shared, 2 * MIB, 2));
  char *after = flags_at(p);
  CHECK(!strcmp(before, after));
}

static void transparent_huge_pages(void) {
  char *p = map_anon(8 * MIB), *aligned = (char *)(((uintptr_t)p + 2 * MIB - 1) & ~(2 * MIB - 1));
  madvise(aligned, 6 * MIB, 14);
  fill(aligned, 6 * MIB, 4);
  cut();
  CHECK(filled(aligned, 6 * MIB, 4));
}

// --- changes after the cut

static void dropped_after(void) {
  char *p = map_anon(64 * PAGE);
  fill(p, 64 * PAGE, 1);
  cut();
  EQUAL(madvise(p + 8 * PAGE, 8 * PAGE, MADV_DONTNEED), 0);
  CHECK(all_zero(p + 8 * PAGE, 8 * PAGE)); // zeros, never the old contents
  CHECK(filled(p, 8 * PAGE, 1));
  CHECK(filled(p + 16 * PAGE, 48 * PAGE, 1 + 16 * 512));
}

static void dropped_before(void) {
  char *p = map_anon(64 * PAGE);
  fill(p, 64 * PAGE, 1);
  MUST(madvise(p + 8 * PAGE, 8 * PAGE, MADV_DONTNEED) == 0);
  cut();
  CHECK(all_zero(p + 8 * PAGE, 8 * PAGE));
  CHECK(filled(p, 8 * PAGE, 1));
}

static void remapped_after(void) {
  char *p = map_anon(64 * PAGE);
  fill(p, 64 * PAGE, 1);
  cut();
  char *q = mremap(p, 64 * PAGE, 256 * PAGE, MREMAP_MAYMOVE);
  CHECK(q != MAP_FAILED);
  CHECK(filled(q, 64 * PAGE, 1));
  CHECK(all_zero(q + 64 * PAGE, 192 * PAGE));
  EQUAL(munmap(q + 10 * PAGE, 10 * PAGE), 0);
  CHECK(filled(q + 20 * PAGE, 44 * PAGE, 1 + 20 * 512));
  pid_t child = fork();
  if (child == 0)
    _exit(filled(q, 10 * PAGE, 1) ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  EQUAL(status, 0);
  // Limits still count: data beyond the limit is refused.
  struct rlimit r = {64 * MIB, RLIM_INFINITY};
  EQUAL(setrlimit(RLIMIT_AS, &r), 0);
  CHECK(mmap(0, 1024 * MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
}

// A thread that writes all the time: what it counted is what it wrote.
static volatile uint64_t written;
static uint64_t *cells;
static volatile int stop;

static void *write_cells(void *unused) {
  for (uint64_t i = 0; !stop; i++) {
    cells[mix(i) % (2048 * 512)]++;
    written = i + 1;
  }
  return unused;
}

static void written_meanwhile(void) {
  cells = map_anon(2048 * PAGE);
  pthread_t t = spawn(write_cells, 0);
  nap(0.05);
  cut();
  stop = 1;
  pthread_join(t, 0);
  uint64_t sum = 0;
  for (int i = 0; i < 2048 * 512; i++)
    sum += cells[i];
  EQUAL(sum, written);
}

SCENARIOS({"anonymous", anonymous}, {"private_file", private_file}, {"shared_file", shared_file},
          {"shared_anonymous", shared_anonymous}, {"private_of_shared", private_of_shared}, {"memfd_twice", memfd_twice}, {"memfd_closed", memfd_closed}, {"never_written", never_written},
          {"deleted_file", deleted_file}, {"beyond_the_end", beyond_the_end}, {"stack_growth", stack_growth},
          {"grows_down", grows_down}, {"heap_growth", heap_growth}, {"guards", guards},
          {"guards_in_file", guards_in_file}, {"no_access", no_access}, {"executable_only", executable_only},
          {"protection_keys", protection_keys}, {"advice", advice}, {"locked", locked}, {"lock_future", lock_future},
          {"named", named}, {"sparse", sparse}, {"zeros", zeros}, {"many_mappings", many_mappings},
          {"fixed_places", fixed_places}, {"huge_pages", huge_pages},
          {"transparent_huge_pages", transparent_huge_pages}, {"dropped_after", dropped_after},
          {"dropped_before", dropped_before}, {"remapped_after", remapped_after},
          {"written_meanwhile", written_meanwhile})
