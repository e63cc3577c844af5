"""What Linux offers to keep track of processes that children of ours start."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on the orphans below this process become its children: a worker whose autoscaler died."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def strangers(known: Iterable[int], guards: Iterable[int]) -> list[psutil.Process]:
    """Living descendants that are neither `known` nor below a guard: what services have started."""
    processes = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for guard in guards:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(guard).children(recursive=True):
                processes.pop(process.pid, None)
    for pid in known:
        processes.pop(pid, None)
    return [process for process in processes.values() if _alive(process)]


def kill_tree(pid: int) -> None:
    """Kill the process and everything below it, whatever signals they ignore or are stopped for."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        # Looked for first: what is below a dead process is not found any more.
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


class Reaper:
    """Collects the exit status of adopted orphans, so that they do not stay as zombies."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def reap(self, known: Iterable[int]) -> None:
        """Called now and then. Spares `known`, and whoever may be waited for elsewhere for one round."""
        zombies = {pid for pid in _children() if _state(pid) == "Z"} - set(known)
        for pid in zombies & self._seen:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies


def reap_all() -> None:
    """Collect every child that has ended; for when nobody else waits for any."""
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
