/* Memory whose checkpoints never delay a real-time writer. Link with libstillpoint_mirror.a -lpthread -ldl -lm.
 *
 * There is one mirror in a process. Stores into its region go through the functions below, or come from code that was
 * compiled with the barrier pass (docs/mirror.md). Every other store leaves the mirror stale. */
#ifndef STILLPOINT_MIRROR_H
#define STILLPOINT_MIRROR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Memory beside the region, such as global variables: whole pages around it are followed, exactly these bytes recovered. */
struct stillpoint_mirror_range {
  void *at;
  size_t len;
};

/* Zeros mean: no backing file, pages of 4 KiB, the offset's switch, not locked, nice 0, the usual address. */
struct stillpoint_mirror_options {
  size_t size;        /* bytes of the region, at least 64 KiB */
  const char *file;   /* backing file; NULL: cycles without writing */
  int huge_pages;     /* 2 MiB where there are some */
  int remap;          /* detach by remapping, for one writing thread */
  int lock;           /* lock region and shadow into memory */
  int nice;           /* of the checkpointer's thread */
  void *base;         /* address of the region; the same for a recovery */
  const struct stillpoint_mirror_range *beside;
  size_t beside_count;
};

enum stillpoint_mirror_phase {
  STILLPOINT_MIRROR_ATTACHED,
  STILLPOINT_MIRROR_CUTTING,
  STILLPOINT_MIRROR_WRITING,
  STILLPOINT_MIRROR_RESYNCHRONISING,
  STILLPOINT_MIRROR_CLOSED
};

struct stillpoint_mirror_stats {
  int phase;
  uint64_t complete, failed;         /* checkpoints */
  uint64_t bytes, last_bytes;        /* written: in all, by the last checkpoint */
  uint64_t last_cut_ns, last_write_ns, last_resync_ns, last_cycle_ns;
  double overhead;                   /* part of the time in which the checkpointer was at work */
  uint64_t noted;                    /* stores that had to note a page */
  uint64_t mirrored;                 /* bytes; as many are their shadow */
  uint64_t threads;                  /* that are known to store */
  uint64_t reserved;
};

/* Recovers the last complete checkpoint, or begins anew. 1: recovered; 0: new; -1: `error` says why. On success `error`
 * says what was asked for and is done otherwise, such as huge pages that there are not. */
int stillpoint_mirror_open(const struct stillpoint_mirror_options *options, char *error, size_t len);
/* Waits for the checkpoint in progress; the region is gone then. */
void stillpoint_mirror_close(void);

/* The word by which a program finds its data again. */
void *stillpoint_mirror_root(void);
void stillpoint_mirror_set_root(void *root);

/* This moment is the instant that the checkpoint holds. Returns at once: its number, -1 while one is being taken, -2
 * without a mirror. */
int64_t stillpoint_mirror_checkpoint(void);
/* 0 when it is complete, -1 if it failed. */
int stillpoint_mirror_wait(int64_t number);
/* Continuous checkpoints: one each so many microseconds; 0 ends them. */
void stillpoint_mirror_every(uint64_t microseconds);
/* Called after each checkpoint, on the checkpointer's thread; `why` is NULL unless it failed. */
void stillpoint_mirror_on_complete(void (*hook)(void *argument, uint64_t sequence, uint64_t bytes, const char *why),
                                   void *argument);
int stillpoint_mirror_stats(struct stillpoint_mirror_stats *stats);
/* Bytes of the shadow that differ from the primary, without atomic words. Of meaning while nobody stores and no checkpoint
 * is being taken: 0 then, or a store went by the barrier. */
uint64_t stillpoint_mirror_differing(void);

/* The region's allocator; libc's while there is no mirror. Blocks of both can be given back. */
void *stillpoint_mirror_malloc(size_t size);
void *stillpoint_mirror_calloc(size_t count, size_t size);
void *stillpoint_mirror_realloc(void *at, size_t size);
void *stillpoint_mirror_aligned_alloc(size_t align, size_t size);
int stillpoint_mirror_posix_memalign(void **out, size_t align, size_t size);
void stillpoint_mirror_free(void *at);
size_t stillpoint_mirror_usable_size(void *at);
char *stillpoint_mirror_strdup(const char *text);
char *stillpoint_mirror_strndup(const char *text, size_t most);

/* Stores. The address may be anywhere. */
void stillpoint_mirror_store8(uint8_t *at, uint8_t value);
void stillpoint_mirror_store16(uint16_t *at, uint16_t value);
void stillpoint_mirror_store32(uint32_t *at, uint32_t value);
void stillpoint_mirror_store64(uint64_t *at, uint64_t value);
void stillpoint_mirror_store_float(float *at, float value);
void stillpoint_mirror_store_double(double *at, double value);
void *stillpoint_mirror_memcpy(void *to, const void *from, size_t len);
void *stillpoint_mirror_memmove(void *to, const void *from, size_t len);
void *stillpoint_mirror_memset(void *at, int value, size_t len);
/* After something else, such as read(2), has written there. */
void stillpoint_mirror_written(void *at, int64_t len);
void stillpoint_mirror_written_string(char *at);

/* Atomic instructions, sequentially consistent; what was there is returned. Operations: 0 exchange, 1 add, 2 subtract,
 * 3 and, 4 nand, 5 or, 6 exclusive or, 7 max, 8 min, 9 unsigned max, 10 unsigned min. An atomic store is an exchange. */
int8_t stillpoint_mirror_rmw8(int8_t *at, int operation, int8_t value);
int16_t stillpoint_mirror_rmw16(int16_t *at, int operation, int16_t value);
int32_t stillpoint_mirror_rmw32(int32_t *at, int operation, int32_t value);
int64_t stillpoint_mirror_rmw64(int64_t *at, int operation, int64_t value);
int8_t stillpoint_mirror_cas8(int8_t *at, int8_t current, int8_t value);
int16_t stillpoint_mirror_cas16(int16_t *at, int16_t current, int16_t value);
int32_t stillpoint_mirror_cas32(int32_t *at, int32_t current, int32_t value);
int64_t stillpoint_mirror_cas64(int64_t *at, int64_t current, int64_t value);

/* Assigns to anything that can be assigned to, structures included. */
#define STILLPOINT_MIRROR_SET(place, value)                            \
  do {                                                                 \
    __typeof__(place) stillpoint_value_ = (value);                     \
    stillpoint_mirror_memcpy(&(place), &stillpoint_value_, sizeof(place)); \
  } while (0)

#ifdef __cplusplus
}
#endif
#endif
