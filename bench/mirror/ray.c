/* ray: spheres on a plane, with shadows and reflections; the picture and the scene are in the heap. */
#include "run.h"
#include <math.h>

typedef struct { double x, y, z; } vector;
typedef struct sphere { vector at, colour; double radius, mirror; struct sphere *next; } sphere;
typedef struct { vector from, to; double nearest; const sphere *hit; } ray;

static vector add(vector a, vector b, double k) { return (vector){a.x + k * b.x, a.y + k * b.y, a.z + k * b.z}; }
static double dot(vector a, vector b) { return a.x * b.x + a.y * b.y + a.z * b.z; }
static vector unit(vector a) { double l = 1 / sqrt(dot(a, a)); return (vector){a.x * l, a.y * l, a.z * l}; }

static void cast(const sphere *all, ray *r) {
  for (const sphere *s = all; s; s = s->next) {
    vector d = add(s->at, r->from, -1);
    double b = dot(d, r->to), q = b * b - dot(d, d) + s->radius * s->radius;
    if (q > 0 && b - sqrt(q) > 1e-6 && b - sqrt(q) < r->nearest) {
      r->nearest = b - sqrt(q);
      r->hit = s;
    }
  }
}

static vector colour(const sphere *all, vector from, vector to, int depth) {
  ray *r = malloc(sizeof *r);
  *r = (ray){from, to, 1e30, NULL};
  cast(all, r);
  vector c = {0.3 + 0.3 * to.z, 0.4, 0.5};
  if (r->hit) {
    vector at = add(from, to, r->nearest), n = unit(add(at, r->hit->at, -1)), light = unit((vector){1, -1, 2});
    ray shadow = {at, light, 1e30, NULL};
    cast(all, &shadow);
    double l = shadow.hit ? 0.1 : 0.1 + 0.9 * fmax(0, dot(n, light));
    c = (vector){r->hit->colour.x * l, r->hit->colour.y * l, r->hit->colour.z * l};
    if (depth > 0 && r->hit->mirror > 0)
      c = add(c, colour(all, at, add(to, n, -2 * dot(to, n)), depth - 1), r->hit->mirror);
  }
  free(r);
  return c;
}

int main(void) {
  enum { WIDE = 1440, HIGH = 960 };
  sphere *all = NULL;
  for (int i = 0; i < 24; i++) {
    sphere *s = malloc(sizeof *s);
    *s = (sphere){{cos(i) * 3, 6 + sin(i * 1.7) * 3, sin(i) * 2}, {0.2 + i % 3 * 0.3, 0.5, 0.9 - i % 5 * 0.1}, 0.6, 0.4, all};
    all = s;
  }
  float *picture = malloc(WIDE * HIGH * 3 * sizeof *picture);
  double began = clock_now();
  for (int y = 0; y < HIGH; y++)
    for (int x = 0; x < WIDE; x++) {
      vector c = colour(all, (vector){0, -2, 0}, unit((vector){(x - WIDE / 2) / 900.0, 1, (HIGH / 2 - y) / 900.0}), 4);
      float *at = picture + 3 * (y * WIDE + x);
      at[0] = (float)c.x;
      at[1] = (float)c.y;
      at[2] = (float)c.z;
    }
  return result(began, digest(picture, WIDE * HIGH * 3 * sizeof *picture, 0));
}
