"""Modules of JavaScript, run in Node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no Node on this machine: nothing ran")


def output_of(script: str, *modules: Path) -> str:
    """Run `script` and return its output. `process.argv` has the addresses of `modules` from 1 on."""
    command = ["node", "-e", script, *(module.as_uri() for module in modules)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
