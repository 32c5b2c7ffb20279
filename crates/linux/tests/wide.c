// Keeps a pattern in all of its wide registers, and looks all the time whether it is still there, until its input ends. It is in no
// system call and calls nobody meanwhile, so that nobody but the kernel could change them.
#include <poll.h>
#include <stdio.h>

static const unsigned char pattern[32] __attribute__((aligned(32))) = {
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32};

// How many of so many looks found another one.
static long looks(long count) {
  long wrong = 0;
  __asm__ volatile("vmovaps (%2), %%ymm7\n"
                   "vmovaps (%2), %%ymm15\n"
                   "1: vxorps (%2), %%ymm7, %%ymm0\n"
                   "vptest %%ymm0, %%ymm0\n"
                   "jz 2f\n"
                   "inc %1\n"
                   "2: vxorps (%2), %%ymm15, %%ymm0\n"
                   "vptest %%ymm0, %%ymm0\n"
                   "jz 3f\n"
                   "inc %1\n"
                   "3: dec %0\n"
                   "jnz 1b\n"
                   "vzeroupper\n"
                   : "+r"(count), "+r"(wrong)
                   : "r"(pattern)
                   : "xmm0", "xmm7", "xmm15", "cc", "memory");
  return wrong;
}

int main(void) {
  struct pollfd input = {.fd = 0, .events = POLLIN};
  puts("begins");
  fflush(stdout);
  long wrong = 0;
  do
    wrong += looks(200000000);
  while (poll(&input, 1, 0) == 0);
  if (wrong)
    printf("%ld looks found another pattern\n", wrong);
  else
    puts("ok");
  return wrong != 0;
}
