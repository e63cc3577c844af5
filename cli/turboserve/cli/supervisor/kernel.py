"""Linux functions to track and end the descendants of this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, such as workers whose autoscaler died."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def strangers(known: Iterable[int], guards: Iterable[int]) -> list[psutil.Process]:
    """Return living descendants that are neither `known` nor below a guard. Services have started these."""
    processes = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for guard in guards:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(guard).children(recursive=True):
                processes.pop(process.pid, None)
    for pid in known:
        processes.pop(pid, None)
    return [process for process in processes.values() if _alive(process)]


def kill_tree(pid: int) -> None:
    """Kill the process and its descendants with SIGKILL, even if they ignore other signals or are stopped."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        # Find the descendants first, since those of a dead process cannot be found any more.
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


class Reaper:
    """Collects the exit status of adopted orphans, so that they do not stay as zombies."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def reap(self, known: Iterable[int]) -> None:
        """Collect zombies that were already there at the previous call, except `known`. Call it periodically.

        The delay lets other code that waits for a child collect its status first.
        """
        zombies = {pid for pid in _children() if _state(pid) == "Z"} - set(known)
        for pid in zombies & self._seen:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies


def reap_all() -> None:
    """Collect every child that has ended. Call it only when no other code waits for a child."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
