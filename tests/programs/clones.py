# Threads that hash all of a large memory, again and again; one line with the result at the end.
import hashlib
import os
import sys
import threading

SIZE, THREADS, ROUNDS = 24 << 20, 4, int(sys.argv[1])
memory = bytearray(hashlib.shake_256(b"clones").digest(SIZE))
kept = {n: [str(n * i) for i in range(2000)] for n in range(THREADS)}
results = {}


def work(n):
    digest = hashlib.sha256()
    for turn in range(ROUNDS):
        at = (n * 7919 + turn * 65537 * 3) % (SIZE - (256 << 10))
        digest.update(memory[at : at + (256 << 10)])
        digest.update("".join(kept[n]).encode())
    results[n] = digest.hexdigest()


threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
for thread in threads:
    thread.start()
print("ready", file=sys.stderr, flush=True)
for thread in threads:
    thread.join()
line = hashlib.sha256("".join(results[n] for n in range(THREADS)).encode()).hexdigest()
os.write(1, (line + "\n").encode())
