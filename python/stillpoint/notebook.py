"""``%stillpoint``: cells of a notebook, or of IPython in a terminal, are undone.

What a front end knows must go on: the request that asked for a rollback is answered, though the program that comes back was in the
middle of an earlier one; requests that have already been read are not lost; cells keep their numbers. All of that travels in a
file without a name, which a rollback does not undo.
"""

import asyncio
import os
import pickle
import sys
import time

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from . import Error, Snapshot, snapshot

USAGE = "%stillpoint snapshot [NAME] | rollback [--kill-children] [NAME] | forget [NAME] | list"
# For so long, seconds, the threads that talk to the front end send on what they were given, and on a busy machine until they sleep, for
# PATIENCE at most. What is half sent at a snapshot would be sent once more, and what is not sent at a rollback never.
SETTLE, PATIENCE = 0.05, 10


@magics_class
class Undo(Magics):
    """Snapshots of a session by their names; the last one is the one that was taken, or gone back to, last."""

    def __init__(self, shell):
        super().__init__(shell)
        self.numbers = {}
        self.carried = None

    @line_magic
    def stillpoint(self, line):
        """%stillpoint snapshot [NAME] | rollback [--kill-children] [NAME] | forget [NAME] | list

        `snapshot` remembers the whole program with its threads. `rollback` goes back there: what later cells have done to variables,
        threads and memory is undone. What has left the program is not: files that were written, what was sent. Cells keep their
        numbers; what follows `snapshot` in its own cell is done again. Without NAME it is the last snapshot.
        """
        words = line.split()
        kill = "--kill-children" in words
        words = [word for word in words if word != "--kill-children"]
        if not words or len(words) > 2 or (kill and words[0] != "rollback"):
            raise UsageError(USAGE)
        name = words[1] if len(words) == 2 else None
        try:
            if words[0] == "snapshot":
                self.snapshot(name)
            elif words[0] == "rollback":
                self.rollback(self.known(name), kill)
            elif words[0] == "forget":
                name = self.known(name)
                Snapshot(self.numbers.pop(name), 0).commit()
            elif words == ["list"]:
                for known in self.numbers:
                    print(known)
            else:
                raise UsageError(USAGE)
        except Error as e:
            raise UsageError(f"{words[0]}: {e.strerror}") from None

    def known(self, name):
        if not self.numbers:
            raise UsageError("there are no snapshots; %stillpoint snapshot takes one")
        name = name or list(self.numbers)[-1]
        if name not in self.numbers:
            raise UsageError(f"there is no snapshot {name}; %stillpoint list tells which there are")
        return name

    def snapshot(self, name):
        if name in self.numbers:
            raise UsageError(f"there is a snapshot {name} already; %stillpoint forget {name} removes it")
        if self.carried is None:
            self.carried = os.memfd_create("stillpoint notebook")
        cell, ahead = self.cell(), self.shell.execution_count - self.cell()
        self.settle()
        here = snapshot()
        name = name or str(here.number)
        if here.value == 0:
            self.numbers[name] = here.number
            print(f"snapshot {name}")
            return
        with os.fdopen(os.dup(self.carried), "rb") as file:
            file.seek(0)
            carried = pickle.load(file)
        self.numbers = carried["numbers"]
        self.numbers[name] = self.numbers.pop(name)
        self.shell.execution_count = carried["cell"] + ahead
        self.go_on(carried)
        undone = "no cell is" if carried["cell"] <= cell + 1 else f"cells {cell + 1} to {carried['cell'] - 1} are"
        if carried["cell"] == cell + 2:
            undone = f"cell {cell + 1} is"
        print(f"back at snapshot {name}: {undone} undone")
        # What carries this over, and the history, are not to be undone.
        own = ("/memfd:stillpoint notebook", str(self.shell.history_manager.hist_file))
        for file in here.files:
            if not file.startswith(own):
                print(f"not undone: {file}")

    def rollback(self, name, kill):
        self.settle()
        carried = {"numbers": self.numbers, "cell": self.cell(), "text": self.shell.history_manager.input_hist_raw[-1]}
        waiting = self.take_requests(carried)
        os.ftruncate(self.carried, 0)
        os.pwrite(self.carried, pickle.dumps(carried), 0)
        try:
            Snapshot(self.numbers[name], 0).rollback(kill_children=kill)
        except Error:
            self.give_requests(waiting)
            raise

    def cell(self):
        """The number of the cell that is being run."""
        return len(self.shell.history_manager.input_hist_raw) - 1

    def settle(self):
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread writes the history now and then. If it was in the middle of that, there would be no way back to a journal that is
        # gone when it is done.
        self.shell.history_manager.writeout_cache()
        kernel = getattr(self.shell, "kernel", None)
        if kernel is None:
            return
        time.sleep(SETTLE)
        end, quiet = time.monotonic() + PATIENCE, 0
        while quiet < 3 and time.monotonic() < end:
            quiet = 0 if _talks(kernel) else quiet + 1
            time.sleep(SETTLE / 10)

    def take_requests(self, carried):
        """Notes whom to answer, and takes the requests that have been read and not yet begun."""
        kernel = getattr(self.shell, "kernel", None)
        if kernel is None:
            return []
        parent = dict(kernel.get_parent("shell"))
        parent["buffers"] = [bytes(buffer) for buffer in parent.get("buffers", [])]
        carried["parent"], carried["ident"] = parent, list(_ident(kernel))
        carried["sent"] = kernel.session.message_count
        begun, waiting = _waiting(kernel)
        carried["waiting"] = [[bytes(frame) for frame in frames] for frames in begun + waiting]
        return waiting

    def give_requests(self, waiting):
        kernel = getattr(self.shell, "kernel", None)
        for frames in waiting:
            if hasattr(kernel, "schedule_dispatch"):
                kernel.schedule_dispatch(kernel.dispatch_shell, frames)
            else:
                kernel.io_loop.add_callback(kernel.shell_main, None, frames)

    def go_on(self, carried):
        """The cell that is being run now is the one that asked for the rollback."""
        history = self.shell.history_manager
        for inputs in (history.input_hist_raw, history.input_hist_parsed):
            inputs.extend([""] * (carried["cell"] + 1 - len(inputs)))
            inputs[carried["cell"]] = carried["text"]
        kernel = getattr(self.shell, "kernel", None)
        if kernel is None:
            return
        import zmq

        kernel.session.message_count = carried["sent"]
        # Whoever is in the middle of the request has these very objects.
        parent, ident = kernel.get_parent("shell"), _ident(kernel)
        parent.clear()
        parent.update(carried["parent"])
        ident[:] = carried["ident"]
        kernel.set_parent(ident, parent, channel="shell")
        self.give_requests([[zmq.Frame(frame) for frame in frames] for frames in carried["waiting"]])


def _talks(kernel):
    """Whether a thread that talks to the front end is not asleep: one of the kernel's own, or of ZeroMQ."""
    kinds = ("iopub_thread", "control_thread", "shell_channel_thread")
    own = [getattr(getattr(kernel, kind, None), "thread", getattr(kernel, kind, None)) for kind in kinds]
    own = {str(getattr(thread, "native_id", None)) for thread in own}
    for tid in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{tid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if rest.split()[0] != "S" and (tid in own or name.startswith("ZMQbg")):
            return True
    return False


def _waiting(kernel):
    """Requests that wait for the one that is being answered: those whose turn will come by itself, and others, which are taken away."""
    import zmq

    begun, waiting, source = [], [], kernel.shell_stream and kernel.shell_stream.socket
    if hasattr(kernel, "schedule_dispatch"):  # ipykernel 6
        while kernel.msg_queue.qsize():
            waiting.append(kernel.msg_queue.get_nowait()[2][0])
    else:  # ipykernel 7: tasks that wait for a lock, and another thread, which reads for this one
        for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name().rpartition("-")[2].zfill(9)):
            part = task.get_coro() if task is not asyncio.current_task() else None
            while part is not None and getattr(part, "cr_frame", None) is not None:
                known = part.cr_frame.f_locals
                if part.cr_code.co_name == "shell_main":
                    begun.append(known["msg"])
                elif getattr(known.get("f"), "func", None) == kernel.shell_main and part.cr_await is None:
                    begun.append(known["args"][0])
                part = part.cr_await
        if kernel.shell_channel_thread:
            source = kernel.shell_channel_thread.manager.get_shell_channel_to_subshell_pair(None).to_socket
    while True:
        try:
            waiting.append(source.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return begun, waiting


def _ident(kernel):
    """Who has sent the request that is being answered; nobody where the kernel does not tell."""
    ident = getattr(kernel, "_parent_ident", {}).get("shell")
    return ident if isinstance(ident, list) else []
