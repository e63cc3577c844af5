"""Runs workers as processes of this machine. They outlive the autoscaler, but never the supervisor."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

from pydantic import SecretStr

from turboserve import environment as variables
from turboserve import lifeline, logs, telemetry
from turboserve.autoscaler.identities import credentials
from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    OnExit,
    PoolProvider,
    ProviderWorker,
    StuckError,
)
from turboserve.autoscaler.providers.process import (
    WatchedProcess,
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
"""Id of the pool that a process belongs to. Stacks on the same machine have different ids."""
POOL_MEMBER_VARIABLE = "TURBOSERVE_POOL_MEMBER"
WORKER_VARIABLE = "TURBOSERVE_WORKER_ID"
HEALTH_VARIABLE = "TURBOSERVE_HEALTH_PORT"
WORKER_VARIABLES = (
    variables.WORKER_SETTINGS | variables.settings_of(Settings.model_fields) | {lifeline.FD_VARIABLE}
) - {POOL_MEMBER_VARIABLE, WORKER_VARIABLE, HEALTH_VARIABLE}
"""Settings of the autoscaler's environment that a worker gets. Those of its pool member are added."""
KILL_S = 5.0
"""A process that lives this long after SIGKILL, in seconds, is stuck in the kernel."""
PROBE_S = 1.0


def pool_id(name: str, scope: str) -> str:
    """Return the id of pool `name`. `scope` identifies the stack.

    For pods, it is the namespace; for others, `pool_scope`, or the address of the broker.
    """
    return hashlib.sha256(f"{name}\0{scope}".encode()).hexdigest()[:16]


def claim(pool: str, member: str) -> socket.socket:
    """Take the pool member for the start of a process. Raises OSError while another process has it.

    The claim is the name of a socket that nobody connects to. The kernel gives a name once, and takes it back
    when the socket is closed or its process ends.
    """
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claimed.bind(f"\0turboserve-pool-{pool}-{member}")
    except OSError:
        claimed.close()
        raise
    return claimed


class LocalProvider(PoolProvider):
    """Starts `command` once per worker, with `environment` and the variables of the pool member.

    Living workers are found in /proc by the environment that they were started with. So a worker that was
    started just before the autoscaler was killed is found, too. `identities` has the passwords of broker
    identities; a worker gets only its own. A worker's output goes where the autoscaler's goes. `launch`
    raises `LaunchError` if the command cannot be started.
    """

    name: ClassVar[str] = "local"

    def __init__(
        self,
        pool: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        host: str = "127.0.0.1",
        identities: Mapping[str, SecretStr] | None = None,
        of_member: Callable[[str], Mapping[str, str]] = lambda member: {},
    ) -> None:
        """`of_member` returns further variables of the worker in a pool member."""
        self._pool, self._of_member = pool, of_member
        self._command = list(command)
        self._environment = dict(environment)
        self._identities = identities or {}
        self._health_host = host
        self._processes: dict[str, tuple[ProviderWorker, WatchedProcess]] = {}
        self._ports: dict[str, int] = {}
        self._on_exit: OnExit | None = None
        self._spawning = asyncio.Lock()
        """Held while processes are started or listed, so that `adopt` does not take one that is starting."""

    def watch(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit

    async def adopt(self) -> list[ProviderWorker]:
        async with self._spawning:
            for pid in await asyncio.to_thread(self._unknown, self._known()):
                self._take(pid)
        return [provider_worker for provider_worker, process in self._processes.values() if process.alive]

    async def reserve(self, member: str) -> None:
        """Do nothing: a worker budgets the machine's memory itself."""

    async def launch(self, member: str, worker: str) -> ProviderWorker:
        async with self._spawning:
            return await self._launch(member, worker)

    async def _launch(self, member: str, worker: str) -> ProviderWorker:
        for provider_worker, process in self._processes.values():
            if provider_worker.worker == worker and process.alive:
                return provider_worker
            if provider_worker.member == member and process.alive:
                raise LaunchError(
                    f"pool member {member} still has {provider_worker.worker}",
                    field=member,
                    retry_after_s=1.0,
                )
        # If another process takes the port meanwhile, the worker fails and is started with another port.
        port = any_free(self._health_host)
        environment = {
            **self._environment,
            **self._of_member(member),
            **credentials(worker, self._identities),
            POOL_VARIABLE: self._pool,
            POOL_MEMBER_VARIABLE: member,
            WORKER_VARIABLE: worker,
            HEALTH_VARIABLE: str(port),
        }
        telemetry.set_traceparent(environment)
        try:
            child = await asyncio.to_thread(self._spawn, member, environment, self._known())
        except OSError as error:
            raise LaunchError(f"{self._command[0]}: {error}", field=member, retry_after_s=5.0) from None
        provider_worker = ProviderWorker(member, worker, child.pid)
        self._watch_process(provider_worker, child)
        self._ports[worker] = port
        return provider_worker

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
        """Do nothing: a process needs no preparation."""

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        ending = [p for m, p in self._processes.values() if m.worker == worker and p.alive]
        for process in ending:
            if not await self._end(process, grace_s):
                raise StuckError(f"the process of {worker} does not end", field=worker, retry_after_s=5.0)

    async def health(self) -> Health:
        return Health(True)

    async def close(self) -> None:
        for _, process in self._processes.values():
            process.close()

    async def _end(self, process: WatchedProcess, grace_s: float) -> bool:
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            process.signal(number)
            try:
                async with asyncio.timeout(limit_s):
                    await process.ended.wait()
                    return True
            except TimeoutError:
                continue
        return False

    def _known(self) -> frozenset[int]:
        """Return the processes that this provider watches. Threads get it, since only the loop may look."""
        return frozenset(process.pid for _, process in self._processes.values() if process.alive)

    def _spawn(
        self, member: str, environment: Mapping[str, str], known: Collection[int]
    ) -> subprocess.Popen[bytes]:
        """Start a worker. Raises LaunchError if another autoscaler has started one in the member, or is
        about to: one that was suspended between its look and its start still has the claim."""
        try:
            claimed = claim(self._pool, member)
        except OSError as error:
            reason = f"another process starts a worker in pool member {member}: {error.strerror}"
            raise LaunchError(reason, field=member, retry_after_s=1.0) from None
        with claimed:
            for pid, found in self._unknown(known).items():
                if found.get(POOL_MEMBER_VARIABLE) == member:
                    reason = f"pool member {member} has process {pid}, which another process has started"
                    raise LaunchError(reason, field=member, retry_after_s=1.0)
            return subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                # Start a new session, so that Ctrl-C reaches only the supervisor, which stops all in order.
                start_new_session=True,
                pass_fds=lifeline.pass_fds(),
            )

    def _unknown(self, known: Collection[int]) -> dict[int, Mapping[str, str]]:
        """Return the environments of this pool's processes that are not among those that are `known`."""
        leaders = [pid for pid in pids() if pid not in known and leads_session(pid)]
        return {pid: found for pid, found in settled_environments(leaders).items() if self._is_ours(found)}

    def _is_ours(self, environment: Mapping[str, str]) -> bool:
        return environment.get(POOL_VARIABLE) == self._pool

    def _take(self, pid: int) -> None:
        """Watch a process of this pool that an earlier autoscaler started."""
        provider_worker = ProviderWorker("", "", pid)
        try:
            process = WatchedProcess(pid, None, lambda status: self._ended(provider_worker, status))
        except ProcessLookupError:
            return
        # Read the environment only now: the descriptor ensures that `pid` still is the same process.
        environment = environment_of(pid)
        member, worker = environment.get(POOL_MEMBER_VARIABLE), environment.get(WORKER_VARIABLE)
        if not self._is_ours(environment) or not member or not worker or worker in self._processes:
            process.close()
            return
        provider_worker = ProviderWorker(member, worker, pid)
        self._processes[worker] = (provider_worker, process)
        port = environment.get(HEALTH_VARIABLE, "")
        if port.isdigit():
            self._ports[worker] = int(port)
        log.info("worker adopted", worker=worker, member=member, pid=pid)

    def _watch_process(self, provider_worker: ProviderWorker, child: subprocess.Popen[bytes]) -> None:
        process = WatchedProcess(child.pid, child, lambda status: self._ended(provider_worker, status))
        self._processes[provider_worker.worker] = (provider_worker, process)

    def _ended(self, provider_worker: ProviderWorker, status: str) -> None:
        self._processes.pop(provider_worker.worker, None)
        self._ports.pop(provider_worker.worker, None)
        if self._on_exit is not None:
            self._on_exit(provider_worker.worker, status)


def worker_environment(
    threads: int, user: str | None, password: str | None, further: Sequence[str] = ()
) -> dict[str, str]:
    """Return the part of this process's environment that a worker needs.

    `user` and `password` are the worker's own credentials. `further` names additional variables. The
    variables of the pool member are left out, and so is `lifeline.PARENT_VARIABLE`: the worker's parent is
    this process, so with that variable the worker would end with the autoscaler.
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
