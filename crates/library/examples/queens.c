// N queens by backtracking without a stack of one's own: where a row has no place left, the whole program goes back to the row before,
// and is told by the value which column to try next.
//
//     cc queens.c -o queens $(pkg-config --cflags --libs stillpoint) && ./queens 8
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <stillpoint.h>

#define MOST 16

static int column[MOST];
static uint64_t here[MOST];

static int attacked(int row, int c) {
  for (int r = 0; r < row; r++)
    if (column[r] == c || abs(column[r] - c) == row - r)
      return 1;
  return 0;
}

int main(int argc, char **argv) {
  int n = argc > 1 ? atoi(argv[1]) : 8;
  if (n < 1 || n > MOST)
    return 2;
  for (int row = 0; row < n;) {
    int c = sp_snapshot(&here[row]); // 0 now; and whatever a later row gives when it does not work out
    if (c < 0) {
      fprintf(stderr, "%s\n", sp_strerror(c));
      return 1;
    }
    while (c < n && attacked(row, c))
      c++;
    if (c < n) {
      column[row++] = c;
      continue;
    }
    sp_commit(here[row]);
    if (row == 0) {
      puts("there is no way");
      return 0;
    }
    int failed = sp_rollback(here[row - 1], column[row - 1] + 1);
    fprintf(stderr, "%s\n", sp_strerror(failed));
    return 1;
  }
  for (int row = 0; row < n; row++)
    printf("%d%c", column[row], row + 1 < n ? ' ' : '\n');
  return 0;
}
