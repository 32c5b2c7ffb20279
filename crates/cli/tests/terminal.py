"""Drives an interactive shell in a pseudo-terminal: a job under `stillpoint run` must stop, continue and end as it
would without a supervisor. Usage: terminal.py STILLPOINT. Prints `ok NAME` for each check; the first that fails ends
the script with what the terminal showed."""

import os, pty, re, select, signal, sys, time

STILLPOINT = sys.argv[1]
PATIENCE = 60  # seconds: a busy machine takes its time
LISTENER = (
    "import signal, sys, time; n = [0]\n"
    "def hit(*_): n[0] += 1; print('hit', n[0], flush=True)\n"
    "signal.signal(signal.SIGINT, hit); print('listening', flush=True)\n"
    "end = time.time() + 60\n"
    "while n[0] < 2 and time.time() < end: time.sleep(0.01)\n"
    "end = time.time() + 0.5\n"  # for those that would be too many
    "while time.time() < end: time.sleep(0.01)\n"
    "print('total', n[0], flush=True)\n"
)


class Shell:
    """bash with job control, in a terminal of its own."""

    def __init__(self):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(PS1="READY> ", TERM="dumb")
            os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
        self.text = ""
        self.expect("READY> ")

    def expect(self, pattern, seconds=PATIENCE):
        """Waits for a pattern, and forgets what came before its end."""
        end = time.time() + seconds
        while not (match := re.search(pattern, self.text)):
            if not select.select([self.fd], [], [], max(0, end - time.time()))[0]:
                sys.exit(f"FAILED: no {pattern!r} in\n{self.text}")
            self.text += os.read(self.fd, 65536).decode(errors="replace")
        self.text = self.text[match.end() :]
        return match

    def type(self, keys):
        os.write(self.fd, keys.encode())

    def do(self, line):
        self.type(line + "\n")
        self.expect("\r\n")  # the echo of the line

    def fg(self):
        """Continues the stopped job in the foreground; bash shows its command line before it does."""
        self.do("fg")
        self.expect("run -- cat\r\n")
        time.sleep(0.2)

    def status(self):
        self.do("echo status=$?=")
        return int(self.expect(r"status=(\d+)=").group(1))


def check(name, truth):
    if not truth:
        sys.exit(f"FAILED: {name}\n{shell.text}")
    print("ok", name)


shell = Shell()

shell.do(f"{STILLPOINT} run -- cat")
time.sleep(0.3)
shell.type("hello\n")
shell.expect("hello\r\nhello\r\n")
shell.type("\x1a")  # Ctrl-Z
shell.expect(r"Stopped[^\r\n]*cat\r\n")
shell.expect("READY> ")
check("Ctrl-Z stops the job and gives the shell the terminal", shell.status() in (146, 148))
shell.expect("READY> ")
answers = [os.popen(f"{STILLPOINT} --json checkpoint cat").read() for _ in range(2)]
check("a stopped job is checkpointed as others are", all('"notes":[]' in answer for answer in answers))
shell.fg()
shell.type("again\n")
shell.expect("again\r\nagain\r\n")
check("fg continues it", True)
shell.type("\x04")  # Ctrl-D
shell.expect("READY> ")
check("end of input ends it", shell.status() == 0)
shell.expect("READY> ")

shell.do(f"{STILLPOINT} run -- cat")
time.sleep(0.3)
shell.type("\x03")  # Ctrl-C
shell.expect("READY> ")
check("Ctrl-C ends it by SIGINT", shell.status() == 130)
shell.expect("READY> ")

with open(sys.argv[2], "w") as script:
    script.write(LISTENER)
shell.do(f"{STILLPOINT} run -- python3 {sys.argv[2]}")
shell.expect("listening")
shell.type("\x03")
shell.expect("hit 1")
shell.type("\x03")
shell.expect("hit 2")
check("each Ctrl-C reaches the job once", shell.expect(r"total (\d+)").group(1) == "2")
shell.expect("READY> ")
check("a job that handles SIGINT exits as it likes", shell.status() == 0)
shell.expect("READY> ")

shell.do(f"{STILLPOINT} run -- cat &")
shell.expect("READY> ")
for _ in range(PATIENCE * 20):
    time.sleep(0.05)
    shell.do("jobs")
    state = shell.expect(r"\[1\]\+\s+(\w+)").group(1)
    shell.expect("READY> ")
    if state == "Stopped":
        break
check("a job in the background that reads the terminal is stopped", state == "Stopped")
shell.fg()
shell.type("front\n")
shell.expect("front\r\nfront\r\n")
shell.type("\x04")
shell.expect("READY> ")
check("and reads on in the foreground", shell.status() == 0)
shell.expect("READY> ")

shell.do(f"{STILLPOINT} run --name left -- sleep 1000")
for _ in range(PATIENCE * 20):
    time.sleep(0.05)
    listed = os.popen(f"{STILLPOINT} ls --json").read()
    if match := re.search(r'"pid":(\d+)', listed):
        break
job = int(match.group(1))
os.close(shell.fd)  # the terminal hangs up
for _ in range(PATIENCE * 20):
    time.sleep(0.05)
    if not os.path.exists(f"/proc/{job}"):
        break
check("a hang-up of the terminal ends the job", not os.path.exists(f"/proc/{job}"))
