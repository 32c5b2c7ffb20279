"""A running program, all of its threads, goes back to where it was.

    import stillpoint

    here = stillpoint.snapshot()    # here.value is 0 now
    if here.value == 0:
        ...                         # try something
        here.rollback(1)            # back above, where here.value is 1
    here.commit()                   # the snapshot is not needed any more

    with stillpoint.speculate() as s:
        if s.value == 0:
            ...
            s.rollback()

    if stillpoint.checkpoint("sim"):
        ...                         # restored from the store, some time later
    if stillpoint.fork_all() == 0:
        ...                         # in a live twin, which has all threads, too

In a notebook, ``%load_ext stillpoint``, then ``%stillpoint snapshot`` and ``%stillpoint rollback``, undo cells.

Nothing that has left the program comes back: bytes in files and sockets, other processes. The library is that of the environment
variable STILLPOINT_LIBRARY, or the one that was installed with this package, with its command, or the system's (``make install``).
"""

import ctypes
import os
from contextlib import contextmanager

from ._command import bundled

__all__ = ["Error", "Snapshot", "checkpoint", "fork_all", "snapshot", "speculate"]


class Error(OSError):
    """There was no snapshot, rollback, checkpoint or twin; the program is as before."""


class Snapshot:
    """A moment of this program: its ``number``, ``value``, which is 0 until a rollback gives another one, and ``files``: after a
    rollback, what has become of files that the program writes, a line for each that is not as it was. They stay as they are.
    """

    def __init__(self, number, value, files=()):
        self.number, self.value, self.files = number, value, list(files)

    def rollback(self, value=1, kill_children=False):
        """Back to the snapshot, where ``value`` (positive) is what it has. Returns only by raising Error."""
        back = _library().sp_rollback_killing if kill_children else _library().sp_rollback
        raise _error(back(self.number, value))

    def commit(self):
        """Forgets the snapshot; the program goes on as it is."""
        code = _library().sp_commit(self.number)
        if code < 0:
            raise _error(code)

    def __repr__(self):
        return f"<snapshot {self.number}, value {self.value}>"


def _changed_files():
    """What a rollback tells of files; nothing with a library that is older than this module."""
    if not hasattr(_library(), "sp_changed_files"):
        return []
    return os.fsdecode(_library().sp_changed_files()).splitlines()


def snapshot():
    """Remembers the program as it is now, with all of its threads."""
    number = ctypes.c_uint64()
    value = _library().sp_snapshot(ctypes.byref(number))
    if value < 0:
        raise _error(value)
    return Snapshot(number.value, value, _changed_files())


@contextmanager
def speculate():
    """A snapshot that is forgotten in the end. After its rollback the block begins once more."""
    here = snapshot()
    try:
        yield here
    finally:
        here.commit()


def checkpoint(name=None):
    """Writes the program to the store, as a checkpoint of the job ``name``. True in a program that was restored from it."""
    code = _library().sp_checkpoint(None if name is None else os.fsencode(name))
    if code < 0:
        raise _error(code)
    return code > 0


def fork_all():
    """A live twin of the program, in a pid namespace of its own: its process id here, 0 in the twin."""
    pid = _library().sp_fork_all()
    if pid < 0:
        raise _error(pid)
    return pid


def load_ipython_extension(shell):
    """``%load_ext stillpoint``: the magic ``%stillpoint``."""
    from .notebook import Undo

    shell.register_magics(Undo)


_loaded = None


def _library():
    global _loaded
    if _loaded is None:
        named = os.environ.get("STILLPOINT_LIBRARY")
        library = ctypes.CDLL(named or bundled("libstillpoint.so") or "libstillpoint.so")
        command = bundled("stillpoint")
        if command and not named:
            # The two speak with each other, so they are to be of one make.
            os.environ.setdefault("STILLPOINT_BIN", command)
        library.sp_snapshot.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
        for name in ("sp_rollback", "sp_rollback_killing"):
            getattr(library, name).argtypes = [ctypes.c_uint64, ctypes.c_int]
        library.sp_commit.argtypes = [ctypes.c_uint64]
        library.sp_checkpoint.argtypes = [ctypes.c_char_p]
        if hasattr(library, "sp_changed_files"):
            library.sp_changed_files.restype = ctypes.c_char_p
        library.sp_strerror.argtypes, library.sp_strerror.restype = [ctypes.c_int], ctypes.c_char_p
        _loaded = library
    return _loaded


def _error(code):
    return Error(-code, _loaded.sp_strerror(code).decode(errors="replace"))
