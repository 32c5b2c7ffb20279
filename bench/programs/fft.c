// FFT: complex fast Fourier transform of 2^SIZE numbers, in place; a round is one transform and its inverse. The check is
// that the numbers are what they were.
#include "workload.h"
#include <complex.h>
#include <math.h>

static double complex *data, *roots;
static size_t n, width;
static bool inverse;

static double complex original(size_t i) {
  uint64_t x = mix(i);
  return ((double)(x & 0xffff) + (double)(x >> 48) * I) / 65536;
}

static void fill(int index, int of) {
  for (size_t i = first_of(n, index, of); i < first_of(n, index + 1, of); i++)
    data[i] = original(i);
  for (size_t i = first_of(n / 2, index, of); i < first_of(n / 2, index + 1, of); i++)
    roots[i] = cexp(-2 * M_PI * I * (double)i / (double)n);
}

static size_t reversed(size_t i) {
  size_t result = 0;
  for (size_t bit = 0; bit < size; bit++)
    result |= ((i >> bit) & 1) << (size - 1 - bit);
  return result;
}

static void permute(int index, int of) {
  for (size_t i = first_of(n, index, of); i < first_of(n, index + 1, of); i++) {
    size_t j = reversed(i);
    if (i < j) {
      double complex other = data[j];
      data[j] = data[i];
      data[i] = other;
    }
  }
}

// The butterflies of one stage; `width` is half the length of its transforms.
static void stage(int index, int of) {
  for (size_t k = first_of(n / 2, index, of); k < first_of(n / 2, index + 1, of); k++) {
    size_t place = k & (width - 1), i = (k - place) * 2 + place, j = i + width;
    double complex root = roots[place * (n / 2 / width)];
    double re = creal(root), im = inverse ? -cimag(root) : cimag(root);
    double x = creal(data[j]), y = cimag(data[j]);
    double complex turned = x * re - y * im + (x * im + y * re) * I;
    data[j] = data[i] - turned;
    data[i] += turned;
  }
}

static void scale(int index, int of) {
  for (size_t i = first_of(n, index, of); i < first_of(n, index + 1, of); i++)
    data[i] /= (double)n;
}

static bool transform(bool back) {
  inverse = back;
  in_parallel(threads, permute);
  for (width = 1; width < n; width *= 2) {
    if (atomic_load(&stopped))
      return false;
    in_parallel(threads, stage);
  }
  if (back)
    in_parallel(threads, scale);
  return true;
}

int main(int count, char **arguments) {
  begin(count, arguments);
  n = (size_t)1 << size;
  data = memory(n * sizeof *data);
  roots = memory(n / 2 * sizeof *roots);
  in_parallel(threads, fill);
  ready();
  bool whole = true;
  while (whole && another_round()) {
    whole = transform(false) && transform(true);
    rounds_done += whole;
  }
  uint64_t sum = digest(data, n * sizeof *data);
  bool intact = true;
  for (size_t i = 0; whole && i < n; i++)
    intact = intact && cabs(data[i] - original(i)) < 1e-9;
  return finish(sum, intact);
}
