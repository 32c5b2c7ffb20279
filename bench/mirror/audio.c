/* audio: a lossless coder: linear prediction by Levinson and Durbin, residuals in Rice codes; decoded again and compared. */
#include "run.h"
#include <math.h>

enum { BLOCK = 4096, ORDER = 12, BLOCKS = 900 };

typedef struct {
  unsigned char *bytes;
  size_t bit;
} stream;

static void put(stream *s, unsigned value, int count) {
  for (int i = count - 1; i >= 0; i--, s->bit++)
    if (value >> i & 1)
      s->bytes[s->bit >> 3] |= (unsigned char)(128 >> (s->bit & 7));
}

static unsigned get(stream *s, int count) {
  unsigned value = 0;
  for (; count > 0; count--, s->bit++)
    value = value << 1 | (s->bytes[s->bit >> 3] >> (7 - (s->bit & 7)) & 1);
  return value;
}

static void predictor(const short *in, int *taps) {
  double r[ORDER + 1], a[ORDER + 1] = {1}, e;
  for (int lag = 0; lag <= ORDER; lag++) {
    r[lag] = lag ? 0 : 1;
    for (int i = lag; i < BLOCK; i++)
      r[lag] += (double)in[i] * in[i - lag];
  }
  e = r[0];
  for (int m = 1; m <= ORDER; m++) {
    double k = r[m], old[ORDER + 1];
    for (int i = 1; i < m; i++)
      k += a[i] * r[m - i];
    k = -k / e;
    memcpy(old, a, sizeof a);
    for (int i = 1; i < m; i++)
      a[i] = old[i] + k * old[m - i];
    a[m] = k;
    e *= 1 - k * k;
  }
  for (int i = 0; i < ORDER; i++)
    taps[i] = (int)lrint(-a[i + 1] * 4096);
}

static int predicted(const short *at, const int *taps) {
  long sum = 0;
  for (int i = 0; i < ORDER; i++)
    sum += (long)taps[i] * at[-1 - i];
  return (int)(sum >> 12);
}

int main(void) {
  size_t count = (size_t)BLOCK * BLOCKS;
  short *in = malloc(count * 2), *back = calloc(count, 2);
  unsigned *residual = malloc(BLOCK * sizeof *residual);
  stream s = {calloc(count * 4, 1), 0};
  uint64_t seed = 1;
  for (size_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    in[i] = (short)(8000 * sin((double)i / 30) + 3000 * sin((double)i / 7.3 + sin((double)i / 5000)) + (double)(seed >> 56));
  }
  double began = clock_now();
  for (int b = 0; b < BLOCKS; b++) {
    const short *block = in + (size_t)b * BLOCK;
    int taps[ORDER];
    predictor(block, taps);
    for (int i = 0; i < ORDER; i++)
      put(&s, (unsigned)taps[i] & 0xffff, 16);
    uint64_t total = 0;
    for (int i = 0; i < BLOCK; i++) {
      int d = block[i] - (i < ORDER ? 0 : predicted(block + i, taps));
      residual[i] = d < 0 ? (unsigned)(-d) * 2 - 1 : (unsigned)d * 2;
      total += residual[i];
    }
    int k = 0;
    while ((uint64_t)BLOCK << (k + 1) < total)
      k++;
    put(&s, (unsigned)k, 5);
    for (int i = 0; i < BLOCK; i++) {
      unsigned high = residual[i] >> k;
      if (high < 24) {
        put(&s, 1, (int)high + 1);
        put(&s, residual[i] & ((1u << k) - 1), k);
      } else {
        put(&s, 0, 24);
        put(&s, residual[i], 20);
      }
    }
  }
  uint64_t sum = digest(s.bytes, s.bit / 8, 0);
  s.bit = 0;
  for (int b = 0; b < BLOCKS; b++) {
    short *block = back + (size_t)b * BLOCK;
    int taps[ORDER];
    for (int i = 0; i < ORDER; i++)
      taps[i] = (short)get(&s, 16);
    int k = (int)get(&s, 5);
    for (int i = 0; i < BLOCK; i++) {
      unsigned high = 0, value;
      while (high < 24 && !get(&s, 1))
        high++;
      value = high < 24 ? high << k | get(&s, k) : get(&s, 20);
      int d = value & 1 ? -(int)((value + 1) / 2) : (int)(value / 2);
      block[i] = (short)(d + (i < ORDER ? 0 : predicted(block + i, taps)));
    }
  }
  if (memcmp(in, back, count * 2))
    return 1;
  return result(began, sum);
}
