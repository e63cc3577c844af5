"""Hitting the processes of a stack."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

from turboserve.bench.chaos.plan import WORKER, Blow, Fault
from turboserve.cli.stack.background import BackgroundStack


class Blows:
    """Carries out faults; remembers what stands still, so that everything is woken at the end."""

    def __init__(self, stack: BackgroundStack) -> None:
        self._stack = stack
        self._stopped: set[int] = set()

    async def hit(self, fault: Fault) -> bool:
        """Whether there was somebody to hit. A stop returns once the process runs again."""
        pid = await asyncio.to_thread(self._pid, fault)
        if pid is None:
            return False
        if fault.blow is Blow.KILL:
            return _send(pid, signal.SIGKILL)
        if fault.blow is Blow.RESTART:
            return _send(pid, signal.SIGTERM)
        if not _send(pid, signal.SIGSTOP):
            return False
        self._stopped.add(pid)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            self._stopped.discard(pid)
            _send(pid, signal.SIGCONT)
        return True

    def wake_all(self) -> None:
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)
        self._stopped.clear()

    def _pid(self, fault: Fault) -> int | None:
        record = self._stack.record
        if fault.target == WORKER:
            pids = record.worker_pids()
            return pids[fault.which % len(pids)] if pids else None
        with suppress(LookupError):
            return record.pid(fault.target)
        return None


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
