/* compress: bzip2 on text that a small grammar makes. */
#include "bzlib.h"
#include "run.h"

int main(void) {
  static const char *const words[] = {"the ", "still ", "point ", "of ", "turning ", "world ", "neither ", "flesh ", "nor\n"};
  size_t size = 3 << 20;
  char *in = malloc(size + 16), *out = malloc(size + 100000);
  uint64_t seed = 1;
  for (size_t n = 0; n < size;) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const char *word = words[(seed >> 40) % 9];
    size_t len = strlen(word);
    memcpy(in + n, word, len);
    n += len;
    if ((seed >> 50) % 17 == 0)
      in[n++ < size ? n - 1 : size - 1] = (char)('0' + (seed >> 33) % 10);
  }
  double began = clock_now();
  unsigned len = (unsigned)size + 100000;
  if (BZ2_bzBuffToBuffCompress(out, &len, in, (unsigned)size, 9, 0, 0) != BZ_OK)
    return 1;
  unsigned back = (unsigned)size;
  uint64_t sum = digest(out, len, 0);
  if (BZ2_bzBuffToBuffDecompress(in, &back, out, len, 0, 0) != BZ_OK || back != size)
    return 1;
  return result(began, sum);
}
