"""A Python program with threads and arrays that goes back to where it was, again and again."""
import os
import queue
import sys
import threading
import time

import numpy
import stillpoint

results = queue.Queue()
counts = [0] * 3
over = False


def work(me):
    rows = numpy.random.default_rng(me).random((40, 40))
    product = rows.copy()
    while not over:
        product = (product @ rows) % 1.7
        counts[me] += 1
    results.put((me, counts[me]))


threads = [threading.Thread(target=work, args=(me,)) for me in range(3)]
for thread in threads:
    thread.start()
array = numpy.arange(500_000)
notes = {"turn": 0}
log = open("log", "a")
for turn in range(int(sys.argv[1])):
    with stillpoint.speculate() as s:
        if s.value == 0:
            array[:] = -1
            notes.clear()
            print("a line", file=log, flush=True)
            extra = [bytearray(n) for n in range(0, 100_000, 997)]
            threading.Thread(target=lambda: notes.update(spoiled=True)).start()
            if turn % 3 == 0:
                array.resize(10, refcheck=False)
            s.rollback(turn + 1)
        assert s.value == turn + 1, s
        then, now = 7 * turn, 7 * (turn + 1)
        assert f"{os.getcwd()}/log: {now} bytes, {then} at the snapshot: it has grown" in s.files, s.files
        assert notes == {"turn": turn}, notes
        assert int(array.sum()) == 499_999 * 250_000
        notes["turn"] = turn + 1
counted = sum(counts)
twin = stillpoint.fork_all()
if twin == 0:  # its threads go on, too
    while sum(counts) < counted + 3:
        time.sleep(0.001)
    open("twin", "w").write(f"{sum(counts) > counted} {int(array.sum())} {notes}")
    os._exit(0)
while not os.path.exists("twin") or os.path.exists(f"/proc/{twin}/root"):
    time.sleep(0.01)
assert open("twin").read() == f"True {int(array.sum())} {notes}"
assert stillpoint.checkpoint("python") is False
try:
    stillpoint.checkpoint("no/name")
except stillpoint.Error as e:
    assert "no/name" in str(e), e
over = True
for thread in threads:
    thread.join()
assert sorted(results.get() for _ in threads) == [(me, counts[me]) for me in range(3)] and all(counts)
try:
    stillpoint.Snapshot(99, 0).rollback()
except stillpoint.Error as e:
    assert "no snapshot" in str(e), e
print("ok")
