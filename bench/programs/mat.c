// MAT: matrix multiplication of SIZE x SIZE 32-bit numbers (modulo 2^32). Each round multiplies the last product by the
// same matrix again. The check is Freivalds': (A B) v = A (B v) for a vector v.
#include "workload.h"

static uint32_t *a, *b, *c;
static size_t rows_done[MOST_THREADS];

static void fill(int index, int of) {
  for (size_t i = first_of(size, index, of) * size; i < first_of(size, index + 1, of) * size; i++) {
    a[i] = (uint32_t)mix(i);
    b[i] = (uint32_t)mix(i + size * size);
  }
}

static void multiply(int index, int of) {
  size_t from = first_of(size, index, of), to = first_of(size, index + 1, of), i;
  for (i = from; i < to && !atomic_load_explicit(&stopped, memory_order_relaxed); i++) {
    uint32_t *row = c + i * size;
    memset(row, 0, size * sizeof *row);
    for (size_t k = 0; k < size; k++) {
      uint32_t factor = a[i * size + k];
      const uint32_t *other = b + k * size;
      for (size_t j = 0; j < size; j++)
        row[j] += factor * other[j];
    }
  }
  rows_done[index] = i;
}

static void times(const uint32_t *matrix, const uint32_t *vector, uint32_t *product) {
  for (size_t i = 0; i < size; i++) {
    uint32_t sum = 0;
    for (size_t j = 0; j < size; j++)
      sum += matrix[i * size + j] * vector[j];
    product[i] = sum;
  }
}

// All rows that were computed are right.
static bool right(void) {
  uint32_t *v = memory(4 * size * sizeof *v), *bv = v + size, *abv = bv + size, *cv = abv + size;
  for (size_t i = 0; i < size; i++)
    v[i] = (uint32_t)mix(~i);
  times(b, v, bv);
  times(a, bv, abv);
  times(c, v, cv);
  bool equal = true;
  for (int t = 0; t < threads; t++)
    for (size_t i = first_of(size, t, threads); i < rows_done[t]; i++)
      equal = equal && abv[i] == cv[i];
  munmap(v, 4 * size * sizeof *v);
  return equal;
}

int main(int count, char **arguments) {
  begin(count, arguments);
  a = memory(size * size * sizeof *a);
  b = memory(size * size * sizeof *b);
  c = memory(size * size * sizeof *c);
  in_parallel(threads, fill);
  bool intact = true;
  ready();
  while (intact && another_round()) {
    in_parallel(threads, multiply);
    intact = right();
    uint32_t *product = c;
    c = a;
    a = product;
    rounds_done++;
  }
  return finish(digest(a, size * size * sizeof *a), intact);
}
