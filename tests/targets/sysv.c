// System V and POSIX objects of interprocess communication: what a program is attached to, and what merely stays.
#include "target.h"
#include <mqueue.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>

static int segment(key_t key, size_t bytes, int flags) {
  int id = shmget(key, bytes, IPC_CREAT | IPC_EXCL | flags);
  if (id < 0)
    SKIP("no System V shared memory here: %s", strerror(errno));
  return id;
}

static key_t own_key(void) {
  return 0x53000000 + getpid();
}

static struct shmid_ds state(int id) {
  struct shmid_ds d = {.shm_segsz = 0};
  EQUAL(shmctl(id, IPC_STAT, &d), 0);
  return d;
}

static void same_state(int id, const struct shmid_ds *before) {
  struct shmid_ds d = state(id);
  EQUAL(d.shm_segsz, before->shm_segsz);
  EQUAL(d.shm_perm.__key, before->shm_perm.__key);
  EQUAL(d.shm_perm.mode, before->shm_perm.mode);
  EQUAL(d.shm_perm.uid, before->shm_perm.uid);
  EQUAL(d.shm_perm.gid, before->shm_perm.gid);
  EQUAL(d.shm_perm.cuid, before->shm_perm.cuid);
  EQUAL(d.shm_perm.cgid, before->shm_perm.cgid);
  EQUAL(d.shm_nattch, before->shm_nattch);
}

// The number of an object in a file, for others.
static void tell(const char *name, int id) {
  FILE *f = fopen(path_of(name), "w");
  MUST(f && fprintf(f, "%d\n", id) > 0 && fclose(f) == 0);
}

static void removed(int id) {
  struct shmid_ds d;
  EQUAL(shmctl(id, IPC_STAT, &d), -1);
}

static void marked(void) { // goes with the program, and comes back with it
  int id = segment(own_key(), 5 * PAGE + 100, 0600);
  char *p = shmat(id, 0, 0);
  fill(p, 5 * PAGE, 1);
  MUST(shmctl(id, IPC_RMID, 0) == 0);
  struct shmid_ds before = state(id);
  CHECK(before.shm_perm.mode & 01000);
  cut();
  same_state(id, &before);
  CHECK(filled(p, 5 * PAGE, 1));
  CHECK(all_zero(p + 5 * PAGE, PAGE));
  char *q = shmat(id, 0, 0); // by its id, still
  CHECK(q != (void *)-1);
  p[0] = 42;
  EQUAL(q[0], 42);
  EQUAL(shmdt(q), 0);
  EQUAL(shmdt(p), 0);
  removed(id);
}

static void by_key(void) { // outlives the program
  int id = segment(own_key(), 3 * PAGE, 0640);
  struct shmid_ds d = state(id);
  d.shm_perm.uid = 12;
  d.shm_perm.gid = 34;
  MUST(shmctl(id, IPC_SET, &d) == 0);
  char *p = shmat(id, 0, 0);
  fill(p, 2 * PAGE, 2);
  struct shmid_ds before = state(id);
  tell("id", id);
  cut();
  same_state(id, &before);
  CHECK(filled(p, 2 * PAGE, 2));
  CHECK(all_zero(p + 2 * PAGE, PAGE));
  memset(p + 2 * PAGE, 7, PAGE); // not to be there after a restore of an earlier state
  EQUAL(shmget(own_key(), 0, 0), id);
  EQUAL(shmdt(p), 0);
  EQUAL(shmctl(id, IPC_RMID, 0), 0);
  removed(id);
}

static void read_only(void) {
  int id = segment(IPC_PRIVATE, 2 * PAGE, 0600);
  char *p = shmat(id, 0, 0), *q = shmat(id, 0, SHM_RDONLY), *r = shmat(id, (void *)0x700000000000, SHM_RND);
  MUST(p != (void *)-1 && q != (void *)-1 && r == (void *)0x700000000000);
  shmctl(id, IPC_RMID, 0);
  fill(p, 2 * PAGE, 3);
  MUST(mprotect(r, PAGE, PROT_READ) == 0);
  struct shmid_ds before = state(id);
  EQUAL(before.shm_nattch, 4);
  cut();
  same_state(id, &before);
  CHECK(filled(q, 2 * PAGE, 3) && filled(r, 2 * PAGE, 3));
  EQUAL(mprotect(q, PAGE, PROT_READ | PROT_WRITE), -1);
  EQUAL(mprotect(r, PAGE, PROT_READ | PROT_WRITE), 0);
  r[5] = 55;
  EQUAL(q[5], 55);
  EQUAL(shmdt(p), 0);
  EQUAL(shmdt(q), 0);
  EQUAL(shmdt(r), 0);
  removed(id);
}

static void parts(void) { // of an attachment, some of them given back, moved, or covered by other memory
  int id = segment(IPC_PRIVATE, 8 * PAGE, 0600);
  char *p = shmat(id, (void *)0x710000000000, 0), *q = shmat(id, (void *)0x711000000000, 0);
  MUST(p != (void *)-1 && q != (void *)-1);
  shmctl(id, IPC_RMID, 0);
  fill(p, 8 * PAGE, 4);
  MUST(munmap(p + 2 * PAGE, PAGE) == 0);
  char *other = mmap(p + 5 * PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  MUST(other == p + 5 * PAGE);
  other[0] = 9;
  char *moved = mremap(q + 6 * PAGE, 2 * PAGE, 2 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)0x20000000);
  MUST(moved == (void *)0x20000000);
  struct shmid_ds before = state(id);
  cut();
  same_state(id, &before);
  EQUAL(other[0], 9);
  other[0] = 0;
  CHECK(filled(p, 2 * PAGE, 4));
  CHECK(!memcmp(p + 6 * PAGE, moved, 2 * PAGE));
  CHECK(!memcmp(p + 3 * PAGE, q + 3 * PAGE, 2 * PAGE));
  moved[3] = 77;
  EQUAL(p[6 * PAGE + 3], 77);
  EQUAL(shmdt(q), 0);
  EQUAL(shmdt(p), 0);
  EQUAL(munmap(moved, 2 * PAGE), 0);
  removed(id);
}

static void locked(void) {
  int id = segment(IPC_PRIVATE, 2 * PAGE, 0600);
  if (shmctl(id, SHM_LOCK, 0)) {
    shmctl(id, IPC_RMID, 0);
    SKIP("not permitted to lock memory");
  }
  char *p = shmat(id, 0, 0);
  fill(p, PAGE, 5);
  struct shmid_ds before = state(id);
  CHECK(before.shm_perm.mode & 02000);
  cut();
  same_state(id, &before);
  CHECK(filled(p, PAGE, 5));
  EQUAL(shmdt(p), 0);
  EQUAL(shmctl(id, IPC_RMID, 0), 0);
}

static void others(void) { // made by somebody else, for whom we run
  int id = -1;
  int ends[2];
  MUST(pipe(ends) == 0);
  pid_t child = fork();
  if (child == 0) {
    if (setresgid(4321, 4321, 4321) || setresuid(1234, 1234, 1234))
      _exit(1);
    int made = shmget(own_key(), PAGE, IPC_CREAT | IPC_EXCL | 0666);
    _exit(write(ends[1], &made, sizeof made) != sizeof made);
  }
  int status;
  MUST(waitpid(child, &status, 0) == child);
  if (status)
    SKIP("not permitted to become somebody else");
  MUST(read(ends[0], &id, sizeof id) == sizeof id && id >= 0);
  close(ends[0]);
  close(ends[1]);
  char *p = shmat(id, 0, 0);
  shmctl(id, IPC_RMID, 0);
  p[0] = 6;
  struct shmid_ds before = state(id);
  EQUAL(before.shm_perm.cuid, 1234);
  cut();
  same_state(id, &before);
  EQUAL(p[0], 6);
}

static void huge(void) {
  int id = shmget(IPC_PRIVATE, 3 << 20, IPC_CREAT | SHM_HUGETLB | 0600);
  char *p = id < 0 ? (void *)-1 : shmat(id, 0, 0);
  if (p == (void *)-1)
    SKIP("no huge pages here");
  shmctl(id, IPC_RMID, 0);
  fill(p, 1 << 20, 7);
  struct shmid_ds before = state(id);
  cut();
  same_state(id, &before);
  CHECK(filled(p, 1 << 20, 7));
}

static void two_segments(void) { // of which one lies behind the other, as one mapping would
  int a = segment(IPC_PRIVATE, 2 * PAGE, 0600), b = segment(IPC_PRIVATE, 2 * PAGE, 0600);
  char *p = shmat(a, (void *)0x712000000000, 0), *q = shmat(b, p + 2 * PAGE, 0), *r = shmat(a, q + 2 * PAGE, 0);
  MUST(p != (void *)-1 && q == p + 2 * PAGE && r == q + 2 * PAGE);
  shmctl(a, IPC_RMID, 0);
  shmctl(b, IPC_RMID, 0);
  p[0] = 1;
  q[0] = 2;
  cut();
  EQUAL(p[0] * 10 + q[0], 12);
  r[0] = 5;
  EQUAL(p[0], 5);
  EQUAL(shmdt(q), 0);
  removed(b);
}

static void semaphores(void) { // stay as they are, whatever becomes of the program
  int id = semget(own_key(), 3, IPC_CREAT | IPC_EXCL | 0600);
  if (id < 0)
    SKIP("no System V semaphores here");
  unsigned short values[3] = {4, 0, 9}, seen[3];
  struct sembuf take = {.sem_num = 0, .sem_op = -1};
  MUST(semctl(id, 0, SETALL, values) == 0 && semop(id, &take, 1) == 0);
  cut();
  EQUAL(semctl(id, 0, GETALL, seen), 0);
  EQUAL(seen[0], 3);
  EQUAL(seen[1], 0);
  EQUAL(seen[2], 9);
  EQUAL(semop(id, &take, 1), 0);
  EQUAL(semctl(id, 0, IPC_RMID), 0);
}

static void queue(void) { // a System V one, with a message
  struct {
    long type;
    char text[8];
  } m = {5, "message"};
  int id = msgget(own_key(), IPC_CREAT | IPC_EXCL | 0600);
  if (id < 0)
    SKIP("no System V message queues here");
  MUST(msgsnd(id, &m, 8, 0) == 0);
  cut();
  memset(&m, 0, sizeof m);
  EQUAL(msgrcv(id, &m, 8, 5, IPC_NOWAIT), 8);
  CHECK(!strcmp(m.text, "message"));
  EQUAL(msgctl(id, IPC_RMID, 0), 0);
}

static struct mq_attr queue_state(mqd_t q) {
  struct mq_attr a = {.mq_flags = 0};
  EQUAL(mq_getattr(q, &a), 0);
  return a;
}

static void posix_queues(void) { // one by name, one whose name is gone; each with two descriptions
  char name[64], gone[64], text[64];
  snprintf(name, sizeof name, "/stillpoint-target-%d", getpid());
  snprintf(gone, sizeof gone, "/stillpoint-target-gone-%d", getpid());
  struct mq_attr a = {.mq_maxmsg = 4, .mq_msgsize = 64};
  mqd_t q = mq_open(name, O_RDWR | O_CREAT | O_EXCL, 0640, &a), r = mq_open(name, O_RDONLY | O_NONBLOCK);
  if (q < 0)
    SKIP("no message queues here: %s", strerror(errno));
  a.mq_maxmsg = 2;
  mqd_t s = mq_open(gone, O_RDWR | O_CREAT | O_EXCL | O_NONBLOCK, 0600, &a), t = mq_open(gone, O_WRONLY);
  MUST(r >= 0 && s >= 0 && t >= 0 && mq_unlink(gone) == 0);
  cut();
  EQUAL(queue_state(q).mq_maxmsg, 4);
  EQUAL(queue_state(q).mq_msgsize, 64);
  EQUAL(queue_state(q).mq_flags, 0);
  EQUAL(queue_state(r).mq_flags, O_NONBLOCK);
  EQUAL(queue_state(s).mq_maxmsg, 2);
  unsigned priority = 0;
  EQUAL(mq_receive(r, text, sizeof text, &priority), -1);
  EQUAL(errno, EAGAIN);
  EQUAL(mq_send(q, "low", 4, 1), 0);
  EQUAL(mq_send(q, "high", 5, 7), 0);
  EQUAL(mq_receive(r, text, sizeof text, &priority), 5);
  EQUAL(priority, 7);
  EQUAL(mq_receive(r, text, sizeof text, &priority), 4);
  EQUAL(mq_send(r, "no", 3, 0), -1);
  EQUAL(mq_send(t, "gone", 5, 3), 0);
  EQUAL(mq_receive(s, text, sizeof text, &priority), 5);
  CHECK(!strcmp(text, "gone"));
  EQUAL(mq_open(gone, O_RDONLY), -1);
  EQUAL(mq_unlink(name), 0);
}

static void stranger(void) { // attached to somebody else's segment, whose id is in a file
  int id = -1;
  FILE *f = fopen(path_of("id"), "r");
  MUST(f && fscanf(f, "%d", &id) == 1);
  char *p = shmat(id, 0, 0);
  MUST(p != (void *)-1);
  memset(p, 99, 3 * PAGE);
  cut();
  EQUAL(shmdt(p), 0);
}

static void by_key_of(void) { // has the key that another process would have
  int pid = -1;
  FILE *f = fopen(path_of("id"), "r");
  MUST(f && fscanf(f, "%d", &pid) == 1);
  segment(0x54000000, PAGE, 0600); // so that the next has another id than the one that was removed
  int id = segment(0x53000000 + pid, PAGE, 0600);
  cut();
  EQUAL(shmctl(id, IPC_RMID, 0), 0);
  EQUAL(shmctl(shmget(0x54000000, 0, 0), IPC_RMID, 0), 0);
}

SCENARIOS({"marked", marked}, {"by_key", by_key}, {"read_only", read_only}, {"parts", parts}, {"locked", locked},
          {"others", others}, {"huge", huge}, {"two_segments", two_segments},
          {"semaphores", semaphores}, {"queue", queue}, {"posix_queues", posix_queues}, {"stranger", stranger}, {"by_key_of", by_key_of})
