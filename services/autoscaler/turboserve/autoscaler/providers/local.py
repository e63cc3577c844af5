"""Workers as processes of this machine. They outlive the autoscaler, and never the supervisor."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import SecretStr

from turboserve import environment as variables
from turboserve import lifeline, logs
from turboserve.autoscaler.identities import credentials
from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    Member,
    OnExit,
    PoolProvider,
    StuckError,
)
from turboserve.autoscaler.providers.process import (
    Watched,
    environment_of,
    leads_session,
    pids,
    settled_environments,
)
from turboserve.config import Settings
from turboserve.free_ports import any_free

log = logs.get("pool")

WORKER_BASE = (*variables.SERVICE, *variables.DEVICE)

POOL_VARIABLE = "TURBOSERVE_POOL_ID"
"""Which pool a process belongs to; the processes of another stack on this machine have another."""
SLOT_VARIABLE = "TURBOSERVE_POOL_SLOT"
WORKER_VARIABLE = "TURBOSERVE_WORKER_ID"
HEALTH_VARIABLE = "TURBOSERVE_HEALTH_PORT"
WORKER_VARIABLES = (
    variables.WORKER_SETTINGS | variables.settings_of(Settings.model_fields) | {lifeline.FD_VARIABLE}
) - {SLOT_VARIABLE, WORKER_VARIABLE, HEALTH_VARIABLE}
"""What a worker is given of the autoscaler's settings; those of its slot come beside them."""
KILL_S = 5.0
"""A process that lives this long after SIGKILL is stuck in the kernel."""
PROBE_S = 1.0


def pool_id(name: str, scope: str) -> str:
    """The id of the pool `name` of the stack that `scope` tells apart (its broker's address)."""
    return hashlib.sha256(f"{name}\0{scope}".encode()).hexdigest()[:16]


class LocalProvider(PoolProvider):
    """Starts `command` once per worker with `environment` and the variables of the slot.

    What lives is found in /proc by the environment that a process was started with, so a worker that was
    started an instant before the autoscaler was killed is found as well. `identities`: passwords of broker
    identities, of which a worker gets its own. Output goes where the autoscaler's
    own goes. Raises `LaunchError` if the command cannot be started.
    """

    name: ClassVar[str] = "local"

    def __init__(
        self,
        pool: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        host: str = "127.0.0.1",
        identities: Mapping[str, SecretStr] | None = None,
    ) -> None:
        self._pool = pool
        self._command = list(command)
        self._environment = dict(environment)
        self._identities = identities or {}
        self._health_host = host
        self._processes: dict[str, tuple[Member, Watched]] = {}
        self._ports: dict[str, int] = {}
        self._on_exit: OnExit | None = None
        self._spawning = asyncio.Lock()
        """Held while a process is started or looked for: one that is being started is nobody's orphan."""

    def watch(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit

    async def adopt(self) -> list[Member]:
        async with self._spawning:
            for pid in await asyncio.to_thread(self._candidates):
                self._take(pid)
        return [member for member, process in self._processes.values() if process.alive]

    async def reserve(self, slot: str) -> None:
        """A machine's memory is the worker's own to budget: there is nothing to set aside."""

    async def launch(self, slot: str, worker: str) -> Member:
        async with self._spawning:
            return await self._launch(slot, worker)

    async def _launch(self, slot: str, worker: str) -> Member:
        for member, process in self._processes.values():
            if member.worker == worker and process.alive:
                return member
            if member.slot == slot and process.alive:
                raise LaunchError(f"slot {slot} still has {member.worker}", field=slot, retry_after_s=1.0)
        # Should it be taken meanwhile, the worker fails and is started with another.
        port = any_free(self._health_host)
        environment = {
            **self._environment,
            **credentials(worker, self._identities),
            POOL_VARIABLE: self._pool,
            SLOT_VARIABLE: slot,
            WORKER_VARIABLE: worker,
            HEALTH_VARIABLE: str(port),
        }
        try:
            child = await asyncio.to_thread(self._spawn, environment)
        except OSError as error:
            raise LaunchError(f"{self._command[0]}: {error}", field=slot, retry_after_s=5.0) from None
        member = Member(slot, worker, child.pid)
        self._watch_process(member, child)
        self._ports[worker] = port
        return member

    async def ready(self, worker: str) -> bool:
        entry, port = self._processes.get(worker), self._ports.get(worker)
        if entry is None or not entry[1].alive or port is None:
            return False
        try:
            async with asyncio.timeout(PROBE_S):
                return await _readyz(self._health_host, port)
        except (OSError, TimeoutError):
            return False

    async def drain(self, worker: str) -> None:
        """A process needs no preparation."""

    async def release(self, slot: str, worker: str | None, grace_s: float) -> None:
        doomed = [p for m, p in self._processes.values() if m.worker == worker and p.alive]
        for process in doomed:
            await self._end(process, grace_s)

    async def health(self) -> Health:
        return Health(True)

    async def close(self) -> None:
        for _, process in self._processes.values():
            process.close()

    async def _end(self, process: Watched, grace_s: float) -> None:
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            process.signal(number)
            try:
                async with asyncio.timeout(limit_s):
                    await process.ended.wait()
                    return
            except TimeoutError:
                continue
        raise StuckError(f"process {process.pid} does not end", field=str(process.pid), retry_after_s=5.0)

    def _spawn(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            # A session of its own: Ctrl-C in the terminal is the supervisor's to handle, in order.
            start_new_session=True,
            pass_fds=lifeline.pass_fds(),
        )

    def _candidates(self) -> list[int]:
        known = {process.pid for _, process in self._processes.values() if process.alive}
        leaders = [pid for pid in pids() if pid not in known and leads_session(pid)]
        return [pid for pid, found in settled_environments(leaders).items() if self._is_ours(found)]

    def _is_ours(self, environment: Mapping[str, str]) -> bool:
        return environment.get(POOL_VARIABLE) == self._pool

    def _take(self, pid: int) -> None:
        """Watch a process that is one of ours and was started by someone before us."""
        member = Member("", "", pid)
        try:
            process = Watched(pid, None, lambda status: self._ended(member, status))
        except ProcessLookupError:
            return
        # Only now, with the process held by its descriptor, is it certain whose environment this is.
        environment = environment_of(pid)
        slot, worker = environment.get(SLOT_VARIABLE), environment.get(WORKER_VARIABLE)
        if not self._is_ours(environment) or not slot or not worker or worker in self._processes:
            process.close()
            return
        member = Member(slot, worker, pid)
        self._processes[worker] = (member, process)
        port = environment.get(HEALTH_VARIABLE, "")
        if port.isdigit():
            self._ports[worker] = int(port)
        log.info("worker adopted", worker=worker, slot=slot, pid=pid)

    def _watch_process(self, member: Member, child: subprocess.Popen[bytes]) -> None:
        process = Watched(child.pid, child, lambda status: self._ended(member, status))
        self._processes[member.worker] = (member, process)

    def _ended(self, member: Member, status: str) -> None:
        self._processes.pop(member.worker, None)
        self._ports.pop(member.worker, None)
        if self._on_exit is not None:
            self._on_exit(member.worker, status)


def worker_environment(
    threads: int, user: str | None, password: str | None, further: Sequence[str] = ()
) -> dict[str, str]:
    """Of this process's environment what a worker needs; `user` and `password` are the worker's own;
    `further` names variables beside the base.

    The variables of the slot are left out, and so is `lifeline.PARENT_VARIABLE`: the worker is not the
    supervisor's child, and were it to ask to die with its parent, it would die with this process.
    """
    environment = variables.child(os.environ, (*WORKER_BASE, *further), WORKER_VARIABLES)
    environment["OMP_NUM_THREADS"] = str(threads)
    if password is not None:
        environment["TURBOSERVE_NATS_PASSWORD"] = password
        environment["TURBOSERVE_NATS_USER"] = user or "worker"
    return environment


async def _readyz(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n")
        await writer.drain()
        return b" 200 " in await reader.readline()
    finally:
        writer.close()
