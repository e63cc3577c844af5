"""Processor time of the state store per renewal, creation and placement, in two modes in turns."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table

from turboserve.bench.migration.stack import STORE, ServerProcesses, server_processes
from turboserve.bench.report import BenchError, percentile
from turboserve.bench.state_store.requests import Caller
from turboserve.contracts.errors import TurboServeError

BATCHED, ONE_BY_ONE, BEFORE = "batched", "one_by_one", "before"
UNLIMITED = {
    "TURBOSERVE_TENANT_SESSIONS": "0",
    "TURBOSERVE_TENANT_CREATIONS_PER_MINUTE": "0",
    "TURBOSERVE_TENANT_SLOTS_FACTOR": "0",
    "TURBOSERVE_WORKER_TIMEOUT_S": "3600",
    "TURBOSERVE_TRANSACTION_DEADLINE_S": "30",
    "TURBOSERVE_REQUEST_DEADLINE_S": "40",
    "TURBOSERVE_LOG_LEVEL": "WARNING",
}
"""Settings under which the load reaches no limit, also on a busy machine."""
IDLE_S = 3.0
REQUESTS = ("renewal", "creation", "placement")


def run(
    workers: Annotated[int, typer.Option(min=1, help="Number of workers that renew every second.")] = 200,
    sessions: Annotated[int, typer.Option(min=1, help="Number of sessions, on all workers together.")] = 400,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of renewals in each block.")] = 10.0,
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks per mode. The modes take turns.")] = 2,
    before: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder `services/state-store` of another checkout. Its state store is the second mode.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Measure what requests cost the state store and Postgres, on servers of its own.

    Each block starts NATS, Redis, Postgres and one state store. Workers join, sessions are created and then
    placed, four at a time. Then the state store is idle, and then all workers renew every second, each in its
    own phase. In the mode `batched` the state store is that of production. In the mode `one_by_one` each
    renewal has a transaction of its own. With `--before`, the mode `before` takes its place: the state store
    of another checkout, with the shared packages of this one.

    - `store_ms`, `postgres_ms`: processor milliseconds per request. Those of renewals are without what the
      idle state store uses. The median of the blocks.
    - `ratio`: `store_ms` of `batched` in that of the second mode, and the same of both processes together
      (`ratio_with_postgres`). The median over pairs of blocks.
    - `answer_s`: time from a worker's request to the answer.
    """
    stores = modes(before)
    found: dict[str, list[BlockCosts]] = {mode: [] for mode in stores}
    for number in range(blocks):
        for mode in stores if number % 2 == 0 else reversed(stores):
            module, environment = stores[mode]
            found[mode].append(block(module, workers, sessions, seconds, environment))
    return {
        **{mode: figures(made) for mode, made in found.items()},
        "ratio": ratios(found, with_postgres=False),
        "ratio_with_postgres": ratios(found, with_postgres=True),
    }


def modes(before: Path | None) -> dict[str, tuple[str, Mapping[str, str]]]:
    """Return the two modes: the modules of their state stores, and what these add to the environment."""
    if before is None:
        return {BATCHED: (STORE, {}), ONE_BY_ONE: ("turboserve.bench.state_store.one_by_one", {})}
    # Folders in this variable come before those that the environment has installed.
    return {BATCHED: (STORE, {}), BEFORE: (STORE, {"PYTHONPATH": str(before.resolve())})}


@dataclass(frozen=True)
class BlockCosts:
    """What one block has measured. Milliseconds are processor time."""

    store_ms: Mapping[str, float]
    postgres_ms: Mapping[str, float]
    idle_share: float
    """Share of one core that the idle state store uses."""
    answers_s: Sequence[float]


def block(
    module: str, workers: int, sessions: int, seconds: float, environment: Mapping[str, str] | None = None
) -> BlockCosts:
    """Measure the state store that `module` starts. `environment` is added to that of its process."""
    with (
        tempfile.TemporaryDirectory(prefix="turboserve-store-") as folder,
        server_processes(Path(folder) / "data", module, {**UNLIMITED, **(environment or {})}) as servers,
    ):
        try:
            return asyncio.run(_measured(servers, workers, sessions, seconds))
        except TurboServeError as error:
            log = (servers.layout.logs / "store.log").read_text(errors="replace")[-2_000:]
            raise BenchError(f"the state store refused a request: {error}\n{log}") from error


async def _measured(servers: ServerProcesses, workers: int, sessions: int, seconds: float) -> BlockCosts:
    used = Used(psutil.Process(servers.store.pid))
    async with Caller.connected(servers.nats_url, workers) as caller:
        # The first requests of each kind prepare their statements.
        await caller.place(await caller.create(1, "first"))
        used.next()
        records = await caller.create(sessions, "ses")
        creation = used.next()
        await caller.place(records)
        placement = used.next()
        await caller.renew_for(1.0)
        used.next()
        began = time.monotonic()
        await asyncio.sleep(IDLE_S)
        idle = used.next().over(time.monotonic() - began)
        began = time.monotonic()
        answers = await caller.renew_for(seconds)
        renewal = used.next().less(idle, time.monotonic() - began)
    costs = {
        "renewal": renewal.over(len(answers)),
        "creation": creation.over(sessions),
        "placement": placement.over(sessions),
    }
    return BlockCosts(
        {name: 1e3 * cost.store_s for name, cost in costs.items()},
        {name: 1e3 * cost.postgres_s for name, cost in costs.items()},
        idle.store_s,
        answers,
    )


@dataclass(frozen=True)
class ProcessorTime:
    """Processor seconds of the state store, and of all processes of Postgres."""

    store_s: float
    postgres_s: float

    def over(self, count: float) -> ProcessorTime:
        """Return the share of one of `count`."""
        return ProcessorTime(self.store_s / count, self.postgres_s / count)

    def less(self, rate: ProcessorTime, seconds: float) -> ProcessorTime:
        """Return the time without what `rate`, in one second, uses in `seconds`. It is never negative."""
        return ProcessorTime(
            max(0.0, self.store_s - rate.store_s * seconds),
            max(0.0, self.postgres_s - rate.postgres_s * seconds),
        )


class Used:
    """Processor time of the state store and of Postgres since the last look."""

    def __init__(self, store: psutil.Process) -> None:
        self._store = store
        self._seen: dict[int, float] = {}
        """Seconds at the last look, by process."""

    def next(self) -> ProcessorTime:
        """Return the time since the last call."""
        store_s = self._since(self._store)
        # Postgres's processes belong to this one, which has started its guard.
        children = psutil.Process().children(recursive=True)
        return ProcessorTime(store_s, sum(self._since(child, "postgres") for child in children))

    def _since(self, process: psutil.Process, name: str = "") -> float:
        """Return the time of a process whose name begins with `name`; 0 of others, and of one that ended."""
        try:
            if not process.name().startswith(name):
                return 0.0
            seconds = processor_s(process)
        except (psutil.Error, OSError):
            return 0.0
        before = self._seen.get(process.pid, 0.0)
        self._seen[process.pid] = seconds
        return seconds - before


def processor_s(process: psutil.Process) -> float:
    """Return the processor seconds of a process so far. Raises OSError or psutil.Error if it is gone."""
    if psutil.LINUX:
        # The clock of a process (clock_getcpuclockid). psutil truncates to 10 ms.
        return time.clock_gettime(~process.pid << 3 | 2)
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def figures(made: Sequence[BlockCosts]) -> dict[str, Any]:
    """Return the medians over the blocks of one mode."""
    answers = [seconds for one in made for seconds in one.answers_s]
    return {
        "store_ms": {
            name: round(statistics.median(one.store_ms[name] for one in made), 3) for name in REQUESTS
        },
        "postgres_ms": {
            name: round(statistics.median(one.postgres_ms[name] for one in made), 3) for name in REQUESTS
        },
        "idle_share": round(statistics.median(one.idle_share for one in made), 3),
        "answer_s": {f"p{share}": percentile(answers, share / 100) for share in (50, 99)},
    }


def ratios(found: Mapping[str, Sequence[BlockCosts]], *, with_postgres: bool) -> dict[str, float | None]:
    """Return the cost of the first mode in that of the second, by request. None: too small to be measured."""

    def cost(one: BlockCosts, name: str) -> float:
        return one.store_ms[name] + (one.postgres_ms[name] if with_postgres else 0.0)

    def ratio(name: str) -> float | None:
        pairs = (
            (cost(first, name), cost(second, name)) for first, second in zip(*found.values(), strict=True)
        )
        each = [first / second for first, second in pairs if second > 0.0]
        return round(statistics.median(each), 3) if each else None

    return {name: ratio(name) for name in REQUESTS}


def table(result: Mapping[str, Any]) -> Table:
    """Return one row for each request."""
    shown_modes = [mode for mode in (BATCHED, ONE_BY_ONE, BEFORE) if mode in result]
    shown = Table("per request", *shown_modes, "ratio", "ratio with Postgres", box=None, pad_edge=False)
    for name in REQUESTS:
        costs = [
            f"{result[mode]['store_ms'][name]:.2f} + {result[mode]['postgres_ms'][name]:.2f} ms"
            for mode in shown_modes
        ]
        ratio, both = result["ratio"][name], result["ratio_with_postgres"][name]
        shown.add_row(name, *costs, *("–" if one is None else f"{one:.2f}" for one in (ratio, both)))
    answers = [f"{1e3 * result[mode]['answer_s']['p99']:.1f} ms" for mode in shown_modes]
    shown.add_row("answer to a renewal, p99", *answers)
    return shown
