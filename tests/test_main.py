"""`python -m octavo` is the command."""

import subprocess
import sys

import octavo


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "octavo", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{octavo.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "octavo", "train", "no.toml"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("octavo: run file 'no.toml' does not exist.")
