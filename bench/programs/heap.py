"""heap.py SOCKET MEBIBYTES: a program with a large heap, which does a unit of work for each line that it gets.

The work: 10,000 lookups at random in a dictionary, and a sum over what they find. The answer is the sum.
"""
import random
import socket
import sys

path, size = sys.argv[1], int(sys.argv[2])
# About 400 bytes an entry, with its key and its place in the dictionary.
heap = {n: bytes(f"{n:020d}", "ascii") * 12 for n in range(size * 2500)}
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen(4)
while True:
    client, _ = server.accept()
    with client, client.makefile("rw") as stream:
        for line in stream:
            rng = random.Random(int(line))
            total = sum(heap[rng.randrange(len(heap))][-1] for _ in range(10_000))
            stream.write(f"{total}\n")
            stream.flush()
