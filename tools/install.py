"""Installs packages as `pip install ARGUMENTS` does, with uv: `python tools/install.py ARGUMENTS`.

The packages go into the environment of this Python. uv takes less than half of pip's processor time, and
several cores. It gets pip's settings: indexes, links, constraints and certificates. Pip installs where it has
settings that this program does not know, and where uv fails.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

PIP = (sys.executable, "-m", "pip")
PASSED = ("index-url", "extra-index-url", "find-links", "constraint")
"""pip's settings that are uv's options, too. Each may have several values."""
WITHOUT_EFFECT = {"cert", "default-timeout", "disable-pip-version-check", "no-compile", "no-input"}
"""pip's settings that uv does not need, or gets by its environment."""
PREFIXES = ("global.", "install.", ":env:.")
"""Places of pip's settings. A later place counts more."""


def settings() -> dict[str, str]:
    """Return pip's settings for `pip install`: name → text."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    found = {}
    for prefix in PREFIXES:
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] = str(ast.literal_eval(value))
    return found


def options_of(found: dict[str, str]) -> list[str] | None:
    """Return uv's options with the same effect as pip's settings; None: there are none."""
    if found.keys() - WITHOUT_EFFECT - {*PASSED}:
        return None
    options = ["--index-strategy", "unsafe-best-match"]
    for name in PASSED:
        for value in found.get(name, "").split():
            # Like pip, ignore folders that do not exist.
            if not value.startswith("file:") or Path(value.removeprefix("file://")).exists():
                options += [f"--{name}", value]
    return options


def with_uv(arguments: list[str]) -> bool:
    """Install with uv. Returns whether that has succeeded."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    found = settings()
    options = options_of(found)
    if uv is None or options is None:
        return False
    environment = {"SSL_CERT_FILE": found["cert"]} if "cert" in found else {}
    command = [uv, "pip", "install", "--python", sys.executable, *options, *arguments]
    return subprocess.run(command, env={**environment, **os.environ}, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    if with_uv(arguments):
        return 0
    command = [*PIP, "install", "--disable-pip-version-check", "--no-input", "--no-compile", *arguments]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
