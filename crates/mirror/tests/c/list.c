/* A list in the region: grows, is checkpointed, and is whole after a recovery. `list FILE grow` runs until it is killed. */
#include "stillpoint_mirror.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct item {
  struct item *next;
  uint64_t number;
  char text[24];
};
struct head {
  struct item *first;
  uint64_t count;
};

int main(int argc, char **argv) {
  struct stillpoint_mirror_options options = {.size = 32 << 20, .file = argv[1]};
  char why[512];
  int how = stillpoint_mirror_open(&options, why, sizeof why);
  if (how < 0) {
    fprintf(stderr, "%s\n", why);
    return 2;
  }
  struct head *head = stillpoint_mirror_root();
  if (!head) {
    head = stillpoint_mirror_calloc(1, sizeof *head);
    stillpoint_mirror_set_root(head);
  }
  uint64_t n = head->count;
  for (struct item *i = head->first; i; i = i->next, n--) {
    char text[24];
    snprintf(text, sizeof text, "item %lu", (unsigned long)i->number);
    if (i->number != n || strcmp(text, i->text)) {
      fprintf(stderr, "item %lu of %lu is wrong\n", (unsigned long)i->number, (unsigned long)n);
      return 1;
    }
  }
  if (n) {
    fprintf(stderr, "%lu items are missing\n", (unsigned long)n);
    return 1;
  }
  printf("%s with %lu items\n", how ? "recovered" : "new", (unsigned long)head->count);
  fflush(stdout);
  if (argc < 3)
    return 0;
  for (;;) {
    struct item *item = stillpoint_mirror_malloc(sizeof *item), made = {head->first, head->count + 1, ""};
    if (!item)
      for (;;)
        pause(); /* full: nothing changes any more until it is killed */
    snprintf(made.text, sizeof made.text, "item %lu", (unsigned long)made.number);
    STILLPOINT_MIRROR_SET(*item, made);
    struct head next = {item, made.number};
    STILLPOINT_MIRROR_SET(*head, next);
    if (made.number % 64 == 0)
      stillpoint_mirror_checkpoint();
    if (made.number % 128 == 0)
      usleep(200);
  }
}
