// JPA, read as "Jacobi, parallel": the heat equation on a SIZE x SIZE grid by Jacobi's method, in two grids that take turns.
// A round is one sweep. The check is that no value leaves the range of the border's, and that the sweeps approach the
// solution, which is known (the border is that of u = x + y).
//
// What the letters stand for in the paper that names this workload could not be found out; see docs/pauses.md.
#include "workload.h"

static double *old, *new;
static double error[MOST_THREADS];

static double solution(size_t i, size_t j) { return (double)(i + j) / (double)(2 * size - 2); }

static void fill(int index, int of) {
  for (size_t i = first_of(size, index, of); i < first_of(size, index + 1, of); i++)
    for (size_t j = 0; j < size; j++)
      if (i == 0 || j == 0 || i == size - 1 || j == size - 1)
        old[i * size + j] = new[i * size + j] = solution(i, j);
      else
        old[i * size + j] = new[i * size + j] = (double)(mix(i * size + j) >> 11) * 0x1p-53;
}

static void sweep(int index, int of) {
  for (size_t i = first_of(size - 2, index, of) + 1; i < first_of(size - 2, index + 1, of) + 1; i++) {
    const double *here = old + i * size, *above = here - size, *below = here + size;
    double *out = new + i *size;
    for (size_t j = 1; j < size - 1; j++)
      out[j] = 0.25 * (above[j] + below[j] + here[j - 1] + here[j + 1]);
  }
}

// The largest distance from the solution.
static void measure(int index, int of) {
  double most = 0;
  for (size_t i = first_of(size, index, of); i < first_of(size, index + 1, of); i++)
    for (size_t j = 0; j < size; j++) {
      double distance = old[i * size + j] - solution(i, j);
      distance = distance < 0 ? -distance : distance;
      // Not a number is a distance that is too large.
      most = distance <= most ? most : distance;
    }
  error[index] = most;
}

static double distance(void) {
  double most = 0;
  in_parallel(threads, measure);
  for (int t = 0; t < threads; t++)
    most = error[t] <= most ? most : error[t];
  return most;
}

int main(int count, char **arguments) {
  begin(count, arguments);
  if (size < 3)
    return 2;
  old = memory(size * size * sizeof *old);
  new = memory(size * size * sizeof *new);
  in_parallel(threads, fill);
  double before = distance();
  ready();
  while (another_round()) {
    in_parallel(threads, sweep);
    double *result = new;
    new = old;
    old = result;
    rounds_done++;
  }
  double after = distance();
  return finish(digest(old, size * size * sizeof *old), rounds_done == 0 || after < before);
}
