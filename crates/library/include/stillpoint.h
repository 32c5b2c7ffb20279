// Stillpoint: a running program, all of its threads, goes back to where it was.
//
// A snapshot is setjmp for the whole process. Taken by any thread at any time, it remembers all threads, memory, mappings and
// descriptors at one instant; none of the other threads has to do anything. sp_rollback brings all of that back: it does not
// return, but sp_snapshot does, once more, in the thread that called it.
//
//     uint64_t here;
//     int came = sp_snapshot(&here);       // 0 now
//     if (came < 0) ...                    // it could not be taken: sp_strerror(came)
//     if (came == 0) {
//         ...                              // try something
//         if (!good)
//             sp_rollback(here, 1);        // back above, where came is 1
//         sp_commit(here);                 // good: this snapshot is not needed any more
//     }
//
// What has left the program does not come back: bytes written to files, sockets and terminals, other processes. See
// docs/branch.md.
//
// The work is done by another process, `stillpoint`, which is started at the first call: that of the environment variable
// STILLPOINT_BIN, or the first in PATH. It ends with the program. All functions may be called by any thread, but not by signal
// handlers.
#ifndef STILLPOINT_H
#define STILLPOINT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Takes a snapshot, and stores its number. Returns 0; the value given to sp_rollback when the program comes back here; or an error,
// negative.
int sp_snapshot(uint64_t *id);

// Back to a snapshot, where sp_snapshot returns `value`, which must be positive. Returns only if that cannot be done: then an
// error, negative, and nothing has changed.
int sp_rollback(uint64_t id, int value);

// As sp_rollback, and kills all child processes that were made since the snapshot, with all that they have made.
int sp_rollback_killing(uint64_t id, int value);

// Files that were not as they were at the snapshot when sp_snapshot came back in this thread because of a rollback: a line for each, in
// words for people. They stay as they are: only memory goes back. Empty if there are none, or it has just been taken; never null. Valid
// until this thread's next sp_snapshot.
const char *sp_changed_files(void);

// Forgets a snapshot; the program goes on as it is. 0, or an error, negative.
int sp_commit(uint64_t id);

// Writes the program, and all processes that it has made, to the store of checkpoints (STILLPOINT_STORE), where they outlast it.
// The checkpoint belongs to the job `name`; null: named after the program and its process id. Returns 0 when it is written, and the
// program goes on; 1 in a program that is restored from it; or an error, negative.
int sp_checkpoint(const char *name);

// fork(2) with all threads, and with all processes that this one has made: a live twin, which lives in a pid namespace of its own,
// where it and its threads have the ids they had. Returns the twin's process id, as it is seen from here; 0 in the twin; or an error,
// negative. Each of the other threads goes on in both. The twin is not a child of this process; docs/branch.md says what it has.
int sp_fork_all(void);

enum sp_error {
  SP_EINVAL = -22,  // an argument makes no sense: a value that is not positive, a name that no job can have
  SP_ENOENT = -2,   // there is no such snapshot
  SP_EPERM = -1,    // something cannot be remembered, undone, or copied: sp_strerror names it
  SP_ENOSYS = -38,  // `stillpoint` cannot be started, or is of another version
  SP_EIO = -5,      // it failed
};

// What an error of this thread's last call means, in words; never null. Valid until its next call.
const char *sp_strerror(int error);

#ifdef __cplusplus
}
#endif
#endif
