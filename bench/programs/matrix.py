"""matrix.py SOCKET MEBIBYTES: a large matrix, and products of some of its rows and a vector.

The line is a row and a number of rows: so many are taken from there on, at equal distances, and the answer is the sum of the
products.
"""
import socket
import sys

import numpy

path, size = sys.argv[1], int(sys.argv[2])
matrix = numpy.random.default_rng(1).random((size * 32, 4096))
vector = numpy.arange(4096) / 4096.0
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen(4)
while True:
    client, _ = server.accept()
    with client, client.makefile("rw") as stream:
        for line in stream:
            row, number = map(int, line.split())
            some = matrix[row :: len(matrix) // number]
            stream.write(f"{float((some @ vector).sum())!r}\n")
            stream.flush()
