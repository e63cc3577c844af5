"""Faults on the processes of a stack."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

from turboserve.cli.stack.background import BackgroundStack
from turboserve.experiments.chaos.degradations import BEHIND, DISKS, NETWORKS
from turboserve.experiments.chaos.network_proxy import UNDISTURBED
from turboserve.experiments.chaos.plan import WORKER, Fault, FaultKind
from turboserve.experiments.chaos.slow_disk import FAST
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
            case FaultKind.SLOW_NETWORK | FaultKind.BEHIND:
                await self._slow_network(fault)
                return True
            case FaultKind.SLOW_DISK:
                await self._slow_disk(fault)
                return True
        if fault.freezes:
            return await self._freeze(fault)
        pid = await asyncio.to_thread(self._pid, fault.target, fault.which)
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

    async def _freeze(self, fault: Fault) -> bool:
        found = [
            await asyncio.to_thread(self._pid, target, fault.which + number)
            for number, target in enumerate(fault.targets)
        ]
        pids = [pid for pid in found if pid is not None]
        if len(set(pids)) < len(found):
            return False
        self._stopped.update(pids)
        try:
            for pid in pids:
                _send(pid, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
        finally:
            self._stopped.difference_update(pids)
            for pid in pids:
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

    async def _slow_network(self, fault: Fault) -> None:
        network = self._surroundings.network
        assert network is not None
        link, _, name = fault.target.partition(" ")
        network.degrade(link, NETWORKS[name] if name else BEHIND)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            network.degrade(link, UNDISTURBED)

    async def _slow_disk(self, fault: Fault) -> None:
        owner, _, name = fault.target.partition(" ")
        disk = self._surroundings.slow_disks[owner]
        disk.conditions = DISKS[name]
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            disk.conditions = FAST

    def wake_all(self) -> None:
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)
        self._stopped.clear()

    def _pid(self, target: str, which: int) -> int | None:
        record = self._stack.record
        if target == WORKER:
            pids = record.worker_pids()
            return pids[which % len(pids)] if pids else None
        with suppress(LookupError):
            return record.pid(target)
        return None


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


PER_ADDRESS = 16
"""Connections from one address of 127.0.0.0/8; a server may limit the number per address."""
LOOK_S = 0.25


class IdleSockets:
    """Holds `count` connections to `port`, and opens another for each that the server closes."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self._count = port, count
        self._open: dict[int, socket.socket] = {}

    async def hold(self, seconds: float) -> None:
        """Hold the connections for `seconds`, and close them in any case."""
        deadline_s = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline_s:
                for number in range(self._count):
                    self._renew(number)
                await asyncio.sleep(LOOK_S)
        finally:
            for each in self._open.values():
                each.close()
            self._open.clear()

    def _renew(self, number: int) -> None:
        if number in self._open:
            if not _closed_by_peer(self._open[number]):
                return
            self._open.pop(number).close()
        # Any address of 127.0.0.0/8 is this machine's. The kernel accepts connections that the server does
        # not.
        address = f"127.0.{1 + number // PER_ADDRESS // 250}.{1 + number // PER_ADDRESS % 250}"
        with suppress(OSError):
            each = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                each.bind((address, 0))
                each.connect_ex(("127.0.0.1", self._port))
            except OSError:
                each.close()
                raise
            self._open[number] = each


def _closed_by_peer(each: socket.socket) -> bool:
    try:
        return each.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
