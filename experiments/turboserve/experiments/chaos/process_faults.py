"""Faults on the processes of a stack."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from urllib.parse import urlsplit

from turboserve.cli.stack.background import BackgroundStack
from turboserve.experiments.chaos.idle_sockets import IdleSockets
from turboserve.experiments.chaos.plan import WORKER, Fault, FaultKind
from turboserve.experiments.chaos.surroundings import Surroundings

REFILL_S = 0.5
"""Interval at which a full disk is filled again, because servers free space."""
MORE_SOCKETS = 32
"""Number of connections beyond the gateway's limit of descriptors."""


class ProcessFaults:
    """Carries out faults, and remembers the stopped processes, so that all of them are resumed at the end."""

    def __init__(self, stack: BackgroundStack, surroundings: Surroundings) -> None:
        self._stack, self._surroundings = stack, surroundings
        self._stopped: set[int] = set()

    async def hit(self, fault: Fault) -> bool:
        """Carry out a fault; returns once a lasting fault is over.

        Returns False if the process does not exist.
        """
        match fault.kind:
            case FaultKind.DISK_FULL:
                await self._fill_disk(fault.seconds)
                return True
            case FaultKind.DESCRIPTORS:
                await self._take_descriptors(fault.seconds)
                return True
            case FaultKind.CLOCK_STEP:
                await self._step_clock(fault.step_s, fault.seconds)
                return True
        pid = await asyncio.to_thread(self._pid, fault)
        if pid is None:
            return False
        if fault.kind is FaultKind.KILL:
            return _send(pid, signal.SIGKILL)
        if fault.kind is FaultKind.RESTART:
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

    async def _fill_disk(self, seconds: float) -> None:
        disk = self._surroundings.disk
        assert disk is not None
        deadline_s = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline_s:
                await asyncio.to_thread(disk.fill)
                await asyncio.sleep(REFILL_S)
        finally:
            disk.free()

    async def _take_descriptors(self, seconds: float) -> None:
        limit = self._surroundings.gateway_descriptors
        assert limit is not None
        port = urlsplit(self._stack.url).port
        assert port is not None
        await IdleSockets(port, limit + MORE_SOCKETS).hold(seconds)

    async def _step_clock(self, step_s: float, seconds: float) -> None:
        clock = self._surroundings.clock
        assert clock is not None
        clock.step(step_s)
        try:
            await asyncio.sleep(seconds)
        finally:
            clock.step(0.0)

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
