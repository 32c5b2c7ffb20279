"""heap.py SOCKET MEBIBYTES: a program with a large heap and some threads, which does a unit of work for each line that it gets.

The work: lookups at random in a dictionary, and a sum over what they find, a part of it in each thread. The line is the
seed and the number of lookups, the answer the sum.
"""
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

THREADS = 4
path, size = sys.argv[1], int(sys.argv[2])
# About 400 bytes an entry, with its key and its place in the dictionary.
heap = {n: bytes(f"{n:020d}", "ascii") * 12 for n in range(size * 2500)}


def keys(seed, number):
    for _ in range(number):
        seed = seed * 16807 % 2147483647
        yield seed % len(heap)


def part(some):
    return sum(heap[key][-1] for key in some)


server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen(4)
with ThreadPoolExecutor(THREADS) as pool:
    list(pool.map(part, [[0]] * THREADS))
    while True:
        client, _ = server.accept()
        with client, client.makefile("rw") as stream:
            for line in stream:
                wanted = list(keys(*map(int, line.split())))
                stream.write(f"{sum(pool.map(part, (wanted[i::THREADS] for i in range(THREADS))))}\n")
                stream.flush()
