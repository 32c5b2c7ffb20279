"""Runs the cells of notebooks in a kernel as a front end does, and compares what they say with what is written in them; then sends
requests without waiting, some of which ask for rollbacks: each is answered, in order."""
import json
import os
import sys
import time

import jupyter_client
import zmq

SECONDS = 120


class Session:
    def __init__(self, directory):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.kernel = jupyter_client.KernelManager(kernel_cmd=command)
        self.kernel.connection_file = os.path.join(directory, "connection.json")
        log = open(os.path.join(directory, "kernel.log"), "ab")
        self.kernel.start_kernel(stdout=log, stderr=log)
        self.client = self.kernel.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def run(self, cell, stop_on_error=True):
        """What a cell says, and its number. A kernel turns away requests that come right after a failure, if it is to stop there."""
        said = []

        def hear(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                said.append(content["text"])
            elif message["msg_type"] == "execute_result":
                said.append(content["data"]["text/plain"] + "\n")
            elif message["msg_type"] == "error":
                said.append("\n".join(content["traceback"]) + "\n")

        reply = self.client.execute_interactive(cell, timeout=SECONDS, output_hook=hear, stop_on_error=stop_on_error)
        return "".join(said), reply["content"]["execution_count"]

    def run_all(self, cells):
        """Answers to requests that are sent at once, in the order in which they come: which it was of, its state and number."""
        requests = [self.client.execute(cell) for cell in cells]
        answers, until = [], time.time() + SECONDS
        while len(answers) < len(requests):
            assert time.time() < until, f"answered: {answers}"
            try:
                message = self.client.get_shell_msg(timeout=1)
            except Exception:  # nothing came
                continue
            content = message["content"]
            place = requests.index(message["parent_header"]["msg_id"])
            answers.append((place, content["status"], content.get("execution_count")))
            if content["status"] == "error":
                print(f"request {place}: {content.get('ename')}: {content.get('evalue')}", file=sys.stderr)
        return answers

    def end(self):
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)


def check_notebook(session, path):
    with open(path) as file:
        cells = [cell for cell in json.load(file)["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        code = "".join(cell["source"])
        expected = "".join("".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in cell["outputs"])
        said, count = session.run(code)
        assert said.rstrip("\n") == expected.rstrip("\n"), f"cell {number}:\n{code}\nsaid {said!r}, expected {expected!r}"
        assert count == number == cell["execution_count"], f"cell {number} was number {count}"


def check_requests(session):
    session.run("%reload_ext stillpoint")
    _, count = session.run("turns = 0; waits = 0\n%stillpoint snapshot here")
    for turn in range(1, 9):
        cells = [f"turns = {turn}", "waits += 1", "%stillpoint rollback here", "waits += 10", "print(turns, waits)"]
        answers = session.run_all(cells)
        assert answers == [(k, "ok", count + 1 + k) for k in range(5)], answers
        said, count = session.run("turns, waits, In[-2], Out.get(1, 'nothing')")
        assert said == "(0, 10, 'print(turns, waits)', 'nothing')\n", said
    for wrong, why in [("rollback nowhere", "no snapshot nowhere"), ("snapshot here", "already"), ("", "snapshot [NAME]")]:
        said, _ = session.run(f"%stillpoint {wrong}", stop_on_error=False)
        assert why in said and "Traceback" not in said, said
    said, _ = session.run("%stillpoint forget here\n%stillpoint list")
    assert "here" not in said, said


directory, *notebooks = sys.argv[1:]
for notebook in notebooks:
    session = Session(directory)
    check_notebook(session, notebook)
    session.end()
session = Session(directory)
check_requests(session)
session.end()
print("ok")
