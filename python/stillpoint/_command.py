"""The command that comes with the package."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def bundled(name):
    """A file that was installed with the package, if it was."""
    path = os.path.join(HERE, name)
    return path if os.path.isfile(path) else None


def main():
    """Becomes ``stillpoint``."""
    command = bundled("stillpoint")
    if command is None:
        sys.exit("stillpoint: this installation has no command in it: install it with the system (make install)")
    os.execv(command, ["stillpoint", *sys.argv[1:]])
