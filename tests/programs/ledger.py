# A database in memory, and what python keeps beside it: SEED STEPS ROWS. In the end the sum of all of it is told.
import hashlib
import random
import sqlite3
import sys

seed, steps, rows = map(int, sys.argv[1:])
chance = random.Random(seed)
base = sqlite3.connect(":memory:")
base.execute("create table entry (id integer primary key, owner integer, amount integer, note text)")
base.execute("create index by_owner on entry (owner)")
notes = {}
for number in range(rows):
    note = "%x" % chance.getrandbits(1600)
    base.execute("insert into entry values (?, ?, ?, ?)", (number, chance.randrange(500), number, note))
    notes[number] = [note[:40], number]
for step in range(steps):
    owner = chance.randrange(500)
    kind = chance.randrange(4)
    if kind == 0:
        base.execute("update entry set amount = amount + ? where owner = ?", (step, owner))
    elif kind == 1:
        number = chance.randrange(rows)
        base.execute("update entry set note = ?, owner = ? where id = ?", ("%x" % chance.getrandbits(1500), owner, number))
        notes[number].append(step)
    elif kind == 2:
        total, = base.execute("select total(amount) from entry where owner = ?", (owner,)).fetchone()
        notes[chance.randrange(rows)][1] += int(total)
    else:
        for number, note in base.execute("select id, note from entry where owner = ?", (owner,)).fetchall():
            notes[number][0] = note[:40]
digest = hashlib.sha256()
for row in base.execute("select * from entry order by id"):
    digest.update(repr(row).encode())
for number in sorted(notes):
    digest.update(repr(notes[number]).encode())
print("ledger", digest.hexdigest())
