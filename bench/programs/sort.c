// SORT: each thread sorts its part of SIZE 32-bit numbers (quicksort), then the parts are merged in pairs. Each round
// starts from other numbers. The check is that they are in order and have the same sum as before.
#include "workload.h"

static uint32_t *numbers, *merged;
static uint64_t sums[MOST_THREADS];
static int width;

static void fill(int index, int of) {
  uint64_t sum = 0;
  for (size_t i = first_of(size, index, of); i < first_of(size, index + 1, of); i++)
    sum += numbers[i] = (uint32_t)mix(i + (size_t)rounds_done * size);
  sums[index] = sum;
}

static void insertion_sort(uint32_t *at, size_t count) {
  for (size_t i = 1; i < count; i++) {
    uint32_t value = at[i];
    size_t j = i;
    for (; j > 0 && at[j - 1] > value; j--)
      at[j] = at[j - 1];
    at[j] = value;
  }
}

static void quicksort(uint32_t *at, size_t count) {
  while (count > 24) {
    uint32_t pivot = at[count / 2];
    size_t i = 0, j = count - 1;
    for (;; i++, j--) {
      while (at[i] < pivot)
        i++;
      while (at[j] > pivot)
        j--;
      if (i >= j)
        break;
      uint32_t other = at[i];
      at[i] = at[j];
      at[j] = other;
    }
    quicksort(at, j + 1);
    at += j + 1;
    count -= j + 1;
  }
  insertion_sort(at, count);
}

static void sort_part(int index, int of) {
  size_t from = first_of(size, index, of);
  quicksort(numbers + from, first_of(size, index + 1, of) - from);
}

// Merges the parts of `width` threads with the next as many.
static void merge(int index, int of) {
  if (index % (2 * width) != 0)
    return;
  int middle = index + width < of ? index + width : of, last = index + 2 * width < of ? index + 2 * width : of;
  size_t i = first_of(size, index, of), out = i, half = first_of(size, middle, of), j = half;
  size_t end = first_of(size, last, of);
  while (i < half || j < end)
    merged[out++] = j == end || (i < half && numbers[i] <= numbers[j]) ? numbers[i++] : numbers[j++];
}

static bool in_order(void) {
  uint64_t sum = 0, before = 0;
  for (int t = 0; t < threads; t++)
    before += sums[t];
  for (size_t i = 0; i < size; i++) {
    sum += numbers[i];
    if (i > 0 && numbers[i - 1] > numbers[i])
      return false;
  }
  return sum == before;
}

int main(int count, char **arguments) {
  begin(count, arguments);
  numbers = memory(size * sizeof *numbers);
  merged = memory(size * sizeof *merged);
  in_parallel(threads, fill);
  bool intact = true;
  ready();
  while (intact && another_round()) {
    in_parallel(threads, fill);
    in_parallel(threads, sort_part);
    for (width = 1; width < threads; width *= 2) {
      in_parallel(threads, merge);
      uint32_t *result = merged;
      merged = numbers;
      numbers = result;
    }
    intact = in_order();
    rounds_done++;
  }
  return finish(digest(numbers, size * sizeof *numbers), intact);
}
