/* parsers: builds the LALR-like item sets and tables of generated grammars: sets, lists and hashes in the heap. */
#include "run.h"

typedef struct state { struct state *next, *list; int count, number; short *items; short *go; } state;
typedef struct { int symbols, terminals, rules; short (*rule)[8]; short *length; uint64_t *first; } grammar;

enum { BUCKETS = 1024 };

static int compare(const void *a, const void *b) { return *(const short *)a - *(const short *)b; }

/* An item is 8 * rule + dot. The set grows until nothing is added. */
static int closure(const grammar *g, short *items, int count, unsigned char *seen) {
  memset(seen, 0, (size_t)g->symbols);
  for (int i = 0; i < count; i++) {
    int rule = items[i] >> 3, dot = items[i] & 7;
    if (dot >= g->length[rule])
      continue;
    int symbol = g->rule[rule][1 + dot];
    if (symbol < g->terminals || seen[symbol])
      continue;
    seen[symbol] = 1;
    for (int r = 0; r < g->rules; r++)
      if (g->rule[r][0] == symbol)
        items[count++] = (short)(r << 3);
  }
  return count;
}

static state *find(state **table, state **last, const short *items, int count, int *states, int symbols) {
  uint64_t h = digest(items, (size_t)count * sizeof *items, 0) % BUCKETS;
  for (state *s = table[h]; s; s = s->next)
    if (s->count == count && !memcmp(s->items, items, (size_t)count * sizeof *items))
      return s;
  state *s = malloc(sizeof *s);
  s->items = malloc((size_t)count * sizeof *items);
  memcpy(s->items, items, (size_t)count * sizeof *items);
  s->go = calloc((size_t)symbols, sizeof *s->go);
  s->count = count;
  s->number = (*states)++;
  s->next = table[h];
  s->list = NULL;
  table[h] = s;
  (*last)->list = s;
  *last = s;
  return s;
}

static uint64_t generate(uint64_t seed) {
  grammar g = {.symbols = 60, .terminals = 30, .rules = 110};
  g.rule = calloc((size_t)g.rules, sizeof *g.rule);
  g.length = calloc((size_t)g.rules, sizeof *g.length);
  for (int r = 0; r < g.rules; r++) {
    g.rule[r][0] = (short)(g.terminals + r % (g.symbols - g.terminals));
    g.length[r] = (short)(1 + (r * 7 + 3) % 5);
    for (int i = 0; i < g.length[r]; i++) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      int terminal = (seed >> 60) < 10 || i == 0;
      g.rule[r][1 + i] = (short)(terminal ? (seed >> 33) % (unsigned)g.terminals : (unsigned)g.terminals + (seed >> 33) % 30);
    }
  }
  state **table = calloc(BUCKETS, sizeof *table), head = {0}, *last = &head;
  short *items = malloc(4096 * sizeof *items), *kernel = malloc(4096 * sizeof *kernel);
  unsigned char *seen = malloc((size_t)g.symbols);
  int states = 0;
  uint64_t sum = 0;
  items[0] = 0;
  find(table, &last, items, 1, &states, g.symbols);
  for (state *s = head.list; s && states < 4000; s = s->list) {
    memcpy(items, s->items, (size_t)s->count * sizeof *items);
    int count = closure(&g, items, s->count, seen);
    for (int symbol = 0; symbol < g.symbols; symbol++) {
      int moved = 0;
      for (int i = 0; i < count; i++)
        if ((items[i] & 7) < g.length[items[i] >> 3] && g.rule[items[i] >> 3][1 + (items[i] & 7)] == symbol)
          kernel[moved++] = (short)(items[i] + 1);
      if (moved) {
        qsort(kernel, (size_t)moved, sizeof *kernel, compare);
        s->go[symbol] = (short)find(table, &last, kernel, moved, &states, g.symbols)->number;
      }
    }
    sum = digest(s->go, (size_t)g.symbols * sizeof *s->go, sum);
  }
  for (state *s = head.list, *n; s; s = n) {
    n = s->list;
    free(s->items);
    free(s->go);
    free(s);
  }
  free(table), free(items), free(kernel), free(seen), free(g.rule), free(g.length);
  return sum;
}

int main(void) {
  uint64_t sum = 0;
  double began = clock_now();
  for (int i = 1; i <= 3000; i++)
    sum ^= generate((uint64_t)i * 77);
  return result(began, sum);
}
