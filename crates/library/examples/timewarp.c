// An optimistic parallel discrete-event simulation. Threads handle the events of a window of time without waiting for each other. If
// one of them hears too late of an event that comes before what it has handled, the whole program goes back to the beginning of the
// window, and is told by the value how far it may go. In the end it must be where one thread alone comes to.
//
//     cc -O2 -pthread timewarp.c -o timewarp $(pkg-config --cflags --libs stillpoint) && ./timewarp 4
//
// Objects that send events, one for each they get, at random: most often to themselves, else to another one (the PHOLD benchmark of
// such simulators).
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <stillpoint.h>

#define OBJECTS 256
#define IN_FLIGHT (4 * OBJECTS)
#define MEAN 1000 // time between an event and the one that it causes
#define MOST 16   // threads
#define SELDOM 16 // one event in so many goes to another object

struct event {
  uint64_t time;
  uint32_t from, to;
  uint64_t number; // of those that this object has sent
};

struct object {
  uint64_t state, random, sent;
  struct event last;
};

struct queue { // a heap, the first event on top
  int n;
  struct event events[IN_FLIGHT];
};

static int before(const struct event *a, const struct event *b) {
  if (a->time != b->time)
    return a->time < b->time;
  return a->from != b->from ? a->from < b->from : a->number < b->number;
}

static void put(struct queue *q, struct event e) {
  int i = q->n++;
  for (; i && before(&e, &q->events[(i - 1) / 2]); i = (i - 1) / 2)
    q->events[i] = q->events[(i - 1) / 2];
  q->events[i] = e;
}

static struct event take(struct queue *q) {
  struct event first = q->events[0], moved = q->events[--q->n];
  int i = 0;
  for (int next; (next = 2 * i + 1) < q->n; i = next) {
    if (next + 1 < q->n && before(&q->events[next + 1], &q->events[next]))
      next++;
    if (!before(&q->events[next], &moved))
      break;
    q->events[i] = q->events[next];
  }
  q->events[i] = moved;
  return first;
}

static uint64_t random_of(struct object *o) { // xorshift64
  o->random ^= o->random << 13;
  o->random ^= o->random >> 7;
  return o->random ^= o->random << 17;
}

static struct event handle(struct object *objects, struct event e) {
  struct object *o = &objects[e.to];
  for (int i = 0; i < 300; i++) // what the event is about
    o->state = (o->state ^ e.time ^ e.from) * 0x9e3779b97f4a7c15 + (o->state >> 29);
  o->last = e;
  uint64_t r = random_of(o);
  uint32_t to = (r >> 52) % SELDOM ? e.to : (r >> 32) % OBJECTS;
  return (struct event){e.time + 1 + r % (2 * MEAN), e.to, to, o->sent++};
}

static void begin(struct object *objects, void (*send)(struct event)) {
  for (uint32_t i = 0; i < OBJECTS; i++)
    objects[i] = (struct object){.state = i, .random = 88172645463325252 + i};
  for (uint32_t i = 0; i < IN_FLIGHT; i++) {
    uint32_t from = i % OBJECTS;
    uint64_t r = random_of(&objects[from]);
    send((struct event){1 + r % (2 * MEAN), from, (r >> 32) % OBJECTS, objects[from].sent++});
  }
}

// By one thread: the measure of all.
static struct object alone[OBJECTS];
static struct queue queue;

static void send_alone(struct event e) {
  put(&queue, e);
}

static uint64_t by_one(uint64_t horizon) {
  uint64_t handled = 0;
  begin(alone, send_alone);
  for (; queue.events[0].time < horizon; handled++)
    put(&queue, handle(alone, take(&queue)));
  return handled;
}

// By several.
static struct object objects[OBJECTS];
static struct part { // what belongs to a thread
  struct queue queue, post;
  pthread_mutex_t lock; // of the post
  uint64_t handled;
} parts[MOST];
static int threads, more, over;
static uint64_t horizon, first, end, too_late;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // of too_late
static pthread_barrier_t barrier;

static void post(struct event e) {
  struct part *to = &parts[e.to % threads];
  pthread_mutex_lock(&to->lock);
  put(&to->post, e);
  pthread_mutex_unlock(&to->lock);
}

static void read_post(struct part *p) {
  pthread_mutex_lock(&p->lock);
  while (p->post.n) {
    struct event e = take(&p->post);
    if (before(&e, &objects[e.to].last)) {
      pthread_mutex_lock(&lock);
      if (e.time < too_late)
        too_late = e.time;
      pthread_mutex_unlock(&lock);
    }
    put(&p->queue, e);
  }
  pthread_mutex_unlock(&p->lock);
}

// All that is to happen before the end of the window, and all that comes of it.
static void speculate(struct part *p) {
  do {
    for (read_post(p); p->queue.n && p->queue.events[0].time < end; read_post(p)) {
      post(handle(objects, take(&p->queue)));
      p->handled++;
    }
    if (pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD) {
      more = 0;
      for (int i = 0; i < threads; i++)
        for (int k = 0; k < parts[i].post.n; k++)
          more |= parts[i].post.events[k].time < end;
    }
    pthread_barrier_wait(&barrier);
  } while (more);
}

static void failed(const char *what, int error) {
  fprintf(stderr, "%s: %s\n", what, sp_strerror(error));
  exit(1);
}

static void *work(void *which) {
  struct part *own = which;
  for (;;) {
    pthread_barrier_wait(&barrier);
    if (over)
      return 0;
    speculate(own);
    pthread_barrier_wait(&barrier);
  }
}

int main(int argc, char **argv) {
  threads = argc > 1 ? atoi(argv[1]) : 4;
  horizon = MEAN * (argc > 2 ? strtoull(argv[2], 0, 10) : 200);
  if (threads < 1 || threads > MOST)
    return 2;
  uint64_t wanted = by_one(horizon), handled = 0, window = MEAN, windows = 0;
  FILE *rollbacks = tmpfile(); // what is written to a file is not undone; where in it comes next is
  if (!rollbacks || fcntl(fileno(rollbacks), F_SETFL, O_APPEND))
    return 1;
  pthread_t others[MOST];
  pthread_barrier_init(&barrier, 0, threads);
  for (int i = 0; i < threads; i++)
    pthread_mutex_init(&parts[i].lock, 0);
  begin(objects, post);
  for (int i = 1; i < threads; i++)
    pthread_create(&others[i], 0, work, &parts[i]);
  for (;; windows++) {
    first = UINT64_MAX;
    for (int i = 0; i < threads; i++) {
      read_post(&parts[i]);
      if (parts[i].queue.n && parts[i].queue.events[0].time < first)
        first = parts[i].queue.events[0].time;
    }
    if (first >= horizon)
      break;
    uint64_t here;
    int came = sp_snapshot(&here); // the others wait at the barrier; they need not
    if (came < 0)
      failed("snapshot", came);
    // In vain so far: up to the first event that came too late nothing is wrong.
    end = came ? first + came : first + window;
    if (end > horizon)
      end = horizon;
    too_late = UINT64_MAX;
    pthread_barrier_wait(&barrier);
    speculate(&parts[0]);
    pthread_barrier_wait(&barrier);
    if (too_late < end) {
      if (write(fileno(rollbacks), "", 1) != 1)
        return 1;
      failed("rollback", sp_rollback(here, (int)(too_late - first)));
    }
    sp_commit(here);
    window = came ? window / 2 + 1 : window + window / 4;
  }
  over = 1;
  pthread_barrier_wait(&barrier);
  for (int i = 1; i < threads; i++)
    pthread_join(others[i], 0);
  for (int i = 0; i < threads; i++)
    handled += parts[i].handled;
  struct stat undone;
  if (fstat(fileno(rollbacks), &undone))
    return 1;
  int same = handled == wanted && !memcmp(objects, alone, sizeof objects);
  printf("%llu events, %llu windows, %lld rollbacks: %s\n", (unsigned long long)handled, (unsigned long long)windows,
         (long long)undone.st_size, same ? "as by one thread" : "NOT as by one thread");
  return !same;
}
