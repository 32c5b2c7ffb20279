"""Threads and numpy: four threads work on shared arrays, in step; each step's digest is a line of output."""
import hashlib
import sys
import threading

import numpy as np

STEPS = int(sys.argv[1])
THREADS = 4
rng = np.random.default_rng(7)
state = rng.random((THREADS, 160, 160))
counts = rng.integers(0, 1 << 40, 1 << 16, dtype=np.uint64)
barrier = threading.Barrier(THREADS + 1)
local = threading.local()


def work(n):
    local.seen = 0
    for step in range(STEPS):
        a = state[n]
        a = a @ a.T
        state[n] = np.tanh(a / np.abs(a).max()) + 0.01 * n
        part = slice(n << 14, (n + 1) << 14)
        counts[part] = (counts[part] * np.uint64(6364136223846793005) + np.uint64(step)) ^ (counts[part] >> np.uint64(7))
        local.seen += 1
        assert local.seen == step + 1
        barrier.wait()
        barrier.wait()


threads = [threading.Thread(target=work, args=(n,), name=f"worker {n}") for n in range(THREADS)]
for t in threads:
    t.start()
with open("digests", "w", buffering=1) as out:
    for step in range(STEPS):
        barrier.wait()
        digest = hashlib.sha256(counts.tobytes() + np.round(state, 9).tobytes()).hexdigest()
        out.write(f"{step} {digest}\n")
        barrier.wait()
for t in threads:
    t.join()
print("done", STEPS)
