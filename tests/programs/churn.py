# Threads that answer each other and make garbage with cycles in it; all of it is counted, and children are asked now and then.
import gc
import os
import queue
import subprocess
import sys
import threading
import time

asked, answered = queue.Queue(), queue.Queue()


class Node:
    def __init__(self, other):
        self.other, self.weight = other, bytearray(200)


def work():
    while True:
        n = asked.get()
        first = Node(None)
        first.other = Node(first)
        answered.put((n, sum(range(n)), first.other.other is first))


for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
lock, turn, per_turn = threading.RLock(), 0, 50
expected = [(n, n * (n - 1) // 2, True) for n in range(per_turn)]
while True:
    turn += 1
    for n in range(per_turn):
        asked.put(n)
    with lock, lock:
        if sorted(answered.get() for _ in range(per_turn)) != expected:
            print("wrong answers", flush=True)
    if turn % 20 == 0:
        gc.collect()
    if len(sys.argv) > 1 and turn % 20 == 0:
        told = subprocess.run(["sh", "-c", "echo $PPID"], capture_output=True, text=True)
        if told.returncode or int(told.stdout) != os.getpid() or threading.get_native_id() != os.getpid():
            print("wrong", told, flush=True)
    print("counted", turn, flush=True)
    time.sleep(0.01)
