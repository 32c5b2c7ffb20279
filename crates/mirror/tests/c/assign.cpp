// Plain assignments to mirrored<T>.
#include "stillpoint_mirror.hpp"
#include <cstdio>
#include <cstring>

using stillpoint::mirrored;

struct point { short x, y, z; };
struct node {
  mirrored<node *> next = nullptr;
  mirrored<int> number = 0;
  mirrored<double> weight = 0.0;
  mirrored<point> at = point{0, 0, 0};
  mirrored<unsigned char> small = 0;
};

int main(int, char **argv) {
  stillpoint_mirror_options options = {};
  options.size = 1 << 20;
  options.file = argv[1];
  {
    stillpoint::mirror mirror(options);
    node *first = mirror.make<node>(), *second = mirror.make<node>();
    first->next = second;
    first->next->number = 40;
    second->number += 2;
    second->number++;
    --second->number;
    second->weight = 1.5;
    second->weight *= 2;
    second->at = point{1, 2, 3};
    second->small = 7;
    second->small <<= 1;
    mirror.set_root(first);
    if (stillpoint_mirror_differing() != 0) return 1;
    if (stillpoint_mirror_wait(stillpoint_mirror_checkpoint()) != 0) return 2;
    second->number = 99;
  }
  stillpoint::mirror mirror(options);
  node *second = mirror.root<node>()->next;
  bool good = mirror.recovered() && second->number == 42 && second->weight == 3.0 && second->at.get().z == 3 &&
              second->small == 14 && second->next == nullptr;
  std::printf("%s\n", good ? "good" : "bad");
  try {
    stillpoint::mirror another(options);
  } catch (const std::runtime_error &why) {
    return good && std::strstr(why.what(), "already") ? 0 : 3;
  }
  return 4;
}
