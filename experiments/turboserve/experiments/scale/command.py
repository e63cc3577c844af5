"""The size that one control plane carries: paced workers, real services, one leader killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from turboserve.bench.report import BenchError
from turboserve.bus import Bus
from turboserve.cli.embedded import Layout
from turboserve.cli.stack.background import BackgroundStack, StackStartError
from turboserve.config import Settings
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.workers import WorkerPhase
from turboserve.experiments.scale.clients import Clients
from turboserve.experiments.scale.hosted import Hosted
from turboserve.experiments.scale.latency import event_to_command, seconds, split
from turboserve.experiments.scale.observed import CommandTimes, percentiles
from turboserve.experiments.scale.usage import LOAD, WORKERS, Usage
from turboserve.subjects import LIST_WORKERS

PER_PROCESS = 50
"""Workers in one process."""
SPARE = 1.25
"""Slots of all workers, as a multiple of the sessions."""
ARRIVAL_SHARE = 0.4
"""Share of the run in which sessions arrive."""
JOIN_LIMIT_S = 300.0
LOOK_S = 1.0
LEADER_LIMIT_S = 60.0
DRAIN_S = 3.0
REQUEST_S = 60.0


def run(
    workers: Annotated[int, typer.Option(min=1, max=256, help="Number of paced workers.")] = 8,
    sessions: Annotated[int, typer.Option(min=1, max=10_000, help="Number of sessions.")] = 60,
    playing: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the sessions that are watched. The others wait.")
    ] = 0.5,
    minutes: Annotated[float, typer.Option(min=0.1, help="Length of the run, from the first arrival.")] = 1.0,
    chunk_bytes: Annotated[int, typer.Option(min=0, help="Bytes of each chunk.")] = 2_048,
    kill_leader: Annotated[
        bool, typer.Option("--kill-leader/--no-kill", help="Whether the leading scheduler is killed midway.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and actions.")] = 0,
) -> dict[str, Any]:
    """Load a whole stack of its own with many workers and sessions, and measure the control plane.

    NATS, Redis, Postgres and all services are real processes of `turboserve up`. Workers are production
    workers on virtual devices, 50 in one process. Sessions arrive in the first 40 % of the run. Watched
    sessions act every 15 s: a prompt, a pause, or a migration.

    - `event_to_command_s`: from an event that asks for a worker (a new session, a resumption) to the
      scheduler's placement. The state store sets the first time before the event's transaction, the second
      one before the commit of the placement. `by_hop`: until the broker has the event (`log`), until the
      scheduler asks for the placement (`decision`), and the rest (`placement`). Events between the kill of
      the leader and the first placement of the next one are apart, in `failover`. `with_failover` has all.
    - `waited_s_by_service`: seconds in which threads could run and had no processor.
    - `chunk_delivery_s`: from the hand-over of a chunk to the broker until a viewer has it.
    - `chunks_lost`: chunks that are missing in what a viewer received.
    """
    slots = max(int(SPARE * sessions / workers + 0.999), 1)
    with tempfile.TemporaryDirectory(prefix="turboserve-scale-") as directory:
        stack = BackgroundStack(
            Path(directory) / "data",
            "--workers",
            f"0..{workers}",
            "--schedulers",
            "2",
            environment=environment(sessions),
        )
        try:
            with stack, hosted(stack, workers, slots, chunk_bytes) as hosts:
                load = Load(stack, hosts, workers, sessions, minutes * 60.0, kill_leader)
                return asyncio.run(load.run(playing, random.Random(f"scale {seed}")))
        except StackStartError as error:
            raise BenchError(f"the stack did not start:\n{error}") from None
        except (httpx.HTTPError, TimeoutError) as error:
            raise BenchError(f"{str(error) or type(error).__name__}\n{stack.output[-2000:]}") from error


def environment(sessions: int) -> dict[str, str]:
    """Return the settings of the stack: no limit of one tenant or of one gateway is below the load."""
    values = {
        "provider": "external",
        "log_level": "WARNING",
        "max_sessions": 2 * sessions + 100,
        "tenant_sessions": 0,
        "tenant_suspended": 0,
        "tenant_creations_per_minute": 0,
        "tenant_prompts_per_minute": 0,
        "stream_limit": 2 * sessions + 100,
        "tenant_streams": 0,
    }
    return {f"TURBOSERVE_{name.upper()}": str(value) for name, value in values.items()}


@contextmanager
def hosted(
    stack: BackgroundStack, workers: int, slots: int, chunk_bytes: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the workers' processes."""
    layout = Layout(stack.data)
    passwords = {f"wk{number}": layout.secret(f"nats.worker.wk{number}") for number in range(workers)}
    address = "nats://" + stack.record.nats_url.rpartition("@")[2]
    names, hosts = list(passwords), []
    command = [sys.executable, "-m", "turboserve.experiments.scale.workers"]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "TURBOSERVE_LOG_LEVEL": "WARNING"}
    with (stack.data.parent / "workers.log").open("ab") as output:
        try:
            for begin in range(0, workers, PER_PROCESS):
                chosen = {name: passwords[name] for name in names[begin : begin + PER_PROCESS]}
                host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=own)
                hosts.append(host)
                assert host.stdin is not None
                host.stdin.write(Hosted(address, chosen, slots, chunk_bytes).to_line())
                host.stdin.flush()
            yield hosts
        finally:
            for host in hosts:
                assert host.stdin is not None
                with suppress(OSError):
                    host.stdin.close()
            for host in hosts:
                try:
                    host.wait(10)
                except subprocess.TimeoutExpired:
                    host.kill()
                    host.wait()


class Load:
    """One run on a stack whose workers are starting."""

    def __init__(
        self,
        stack: BackgroundStack,
        hosts: list[subprocess.Popen[bytes]],
        workers: int,
        sessions: int,
        seconds: float,
        kill_leader: bool,
    ) -> None:
        self._stack, self._hosts = stack, hosts
        self._workers, self._sessions, self._seconds = workers, sessions, seconds
        self._kill_leader = kill_leader
        self._usage = Usage()
        self._killed_at: float | None = None

    async def run(self, playing: float, chance: random.Random) -> dict[str, Any]:
        """Play the whole run. Returns the result."""
        record = self._stack.record
        bus = await Bus.connect("bench", Settings(nats_url=record.nats_url))
        limits = httpx.Limits(max_connections=512)
        times = CommandTimes()
        try:
            joined_s = await self._joined(bus)
            await times.follow(bus)
            async with httpx.AsyncClient(base_url=record.url, timeout=REQUEST_S, limits=limits) as api:
                clients = Clients(api, playing, chance)
                before = psutil.cpu_times()
                self._look(begins=True)
                began, began_at = time.monotonic(), time.time()
                looking = asyncio.create_task(self._look_forever())
                killing = asyncio.create_task(self._kill(0.5 * self._seconds))
                try:
                    rate = await clients.arrive(self._sessions, ARRIVAL_SHARE * self._seconds)
                    await asyncio.sleep(max(0.0, began + self._seconds - DRAIN_S - time.monotonic()))
                    await clients.stop_acting()
                    await killing
                    await asyncio.sleep(DRAIN_S)
                    lasted_s = time.monotonic() - began
                finally:
                    looking.cancel()
                    killing.cancel()
                    self._look()
                    await clients.end()
                after = psutil.cpu_times()
        finally:
            await bus.close()
        return {
            **self._result(clients, times, began_at),
            "creates_per_s": round(rate, 2),
            "join_s": round(joined_s, 1),
            "seconds": round(lasted_s, 1),
            "cpu_busy": round(busy(before, after), 3),
        }

    async def _joined(self, bus: Bus) -> float:
        began = time.monotonic()
        while True:
            ready = 0
            # A busy store answers some requests with `unavailable`.
            with suppress(TurboServeError):
                page = await bus.call(LIST_WORKERS, ListWorkers(), deadline_s=REQUEST_S)
                ready = sum(record.phase is WorkerPhase.READY for record in page.workers)
            if ready >= self._workers:
                return time.monotonic() - began
            if any(host.poll() is not None for host in self._hosts):
                log = (self._stack.data.parent / "workers.log").read_text(errors="replace")
                raise BenchError(f"the workers' process has ended:\n{log[-2000:]}")
            if time.monotonic() - began > JOIN_LIMIT_S:
                raise BenchError(f"{ready} of {self._workers} workers are ready after {JOIN_LIMIT_S:g} s")
            await asyncio.sleep(0.5)

    def _look(self, *, begins: bool = False) -> None:
        usage = self._usage
        usage.add(None, self._stack.descendants(), begins=begins)
        usage.add("supervisor", [psutil.Process(self._stack.process.pid)], begins=begins)
        usage.add(WORKERS, [psutil.Process(host.pid) for host in self._hosts], begins=begins)
        usage.add(LOAD, [psutil.Process()], begins=begins)

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    async def _kill(self, after_s: float) -> None:
        if not self._kill_leader:
            return
        await asyncio.sleep(after_s)
        leader = await self._leader()
        self._killed_at = time.time()
        os.kill(self._stack.record.pid(leader), signal.SIGKILL)

    async def _leader(self) -> str:
        """Wait until a scheduler leads. Returns its name. Raises BenchError."""
        deadline = time.monotonic() + LEADER_LIMIT_S
        async with httpx.AsyncClient(timeout=REQUEST_S) as health:
            while time.monotonic() < deadline:
                for name, process in self._stack.record.processes.items():
                    if name.startswith("scheduler"):
                        with suppress(httpx.HTTPError):
                            # A scheduler that is not ready may lead, too.
                            answer = await health.get(f"http://127.0.0.1:{process['port']}/readyz")
                            if "leader" in answer.text:
                                return name
                await asyncio.sleep(LOOK_S)
        raise BenchError(f"no scheduler leads within {LEADER_LIMIT_S:g} s")

    def _result(self, clients: Clients, times: CommandTimes, began_at: float) -> dict[str, Any]:
        _, failover = split(times.commands, self._killed_at)
        return {
            "workers": self._workers,
            "sessions": len(clients.sessions),
            "playing": len(clients.viewers),
            "event_to_command_s": event_to_command(times.commands, self._killed_at, began_at),
            "failover": {"killed": self._killed_at is not None, "event_to_command_s": seconds(failover)},
            "unanswered": times.unanswered,
            "create_s": percentiles(clients.create_s),
            "prompt_applied_s": percentiles(clients.prompt_applied_s),
            "chunk_delivery_s": percentiles(clients.chunk_delivery_s),
            "chunks": clients.chunks,
            "chunks_lost": clients.chunks_lost,
            "silent_viewers": clients.silent,
            "events": dict(sorted(times.kinds.items())),
            "refused": dict(sorted(clients.refused.items())),
            "cpu_s_by_service": self._usage.cpu_s(),
            "waited_s_by_service": self._usage.waited_s(),
            "rss_by_service": self._usage.rss_bytes(),
        }


def busy(before: Any, after: Any) -> float:
    """Return the busy share of the machine's processor time between two of `psutil.cpu_times`."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    whole = sum(spent.values())
    return 1.0 - (spent["idle"] + spent.get("iowait", 0.0)) / whole if whole else 0.0
