"""The package with the library and the command in it, which cargo builds in the tree that this folder lies in.

The library is called by way of ctypes: one wheel serves all versions of Python. With STILLPOINT_PROFILE=dev it is built as for tests.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

TREE = Path(__file__).resolve().parent.parent
NATIVE = ("libstillpoint.so", "stillpoint")


def built():
    """The folder that the library and the command are in, built now."""
    if sys.platform != "linux":
        sys.exit("stillpoint: programs are snapshot on Linux only")
    if not (TREE / "crates" / "library").is_dir():
        sys.exit(f"stillpoint: the library is built from its sources, which are not in {TREE}: install from the tree")
    cargo = os.environ.get("CARGO") or shutil.which("cargo") or str(Path.home() / ".cargo" / "bin" / "cargo")
    profile = os.environ.get("STILLPOINT_PROFILE", "release")
    command = [cargo, "build", "--locked", "--profile", profile, "-p", "stillpoint", "-p", "stillpoint-library"]
    try:
        subprocess.run(command, cwd=TREE, check=True)
        told = subprocess.run(
            [cargo, "metadata", "--locked", "--no-deps", "--format-version", "1"],
            cwd=TREE,
            check=True,
            stdout=subprocess.PIPE,
        )
    except FileNotFoundError:
        sys.exit("stillpoint: cargo, which builds the library, is not installed (https://rustup.rs)")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"stillpoint: cargo failed with {failed.returncode}")
    return Path(json.loads(told.stdout)["target_directory"]) / ("debug" if profile == "dev" else profile)


class Build(build_py):
    """With what is native. An editable installation has the system's instead, as the folder in PYTHONPATH does."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        folder, package = built(), Path(self.build_lib) / "stillpoint"
        for name in NATIVE:
            shutil.copy2(folder / name, package / name)
            strip = shutil.which("strip")
            if strip:
                subprocess.run([strip, "--strip-debug", package / name], check=True)

    def get_outputs(self, include_bytecode=True):
        native = [] if self.editable_mode else [str(Path(self.build_lib) / "stillpoint" / name) for name in NATIVE]
        return super().get_outputs(include_bytecode) + native


class Wheel(bdist_wheel):
    """For this machine's kind, and every Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Native(Distribution):
    """It has code of the machine in it, though none that setuptools knows how to build."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Native)
