"""Cells of the comparison: one run of one policy on one workload. Finished cells are kept in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import turboserve
from turboserve.experiments.slack.metrics import StreamMetrics, measure
from turboserve.experiments.slack.policies import COUNTED, HOST_WORKERS, POLICIES
from turboserve.experiments.slack.profiles import PROFILES
from turboserve.experiments.slack.workloads import WORKLOADS
from turboserve.simulation.streams import WARM_UP_S, StreamScale, run_streams

SLOTS = 64
"""Sessions in a worker's memory where K does not limit them: SlackServe refuses no stream."""
LONGEST_TAIL_S = 600.0
"""Virtual time after the last arrival at which a run ends, whatever is incomplete."""


@dataclass(frozen=True)
class Cell:
    """Parameters of one run."""

    profile: str
    workload: str
    policy: str
    workers: int
    streams: int
    rate: float
    """Arrivals per second for each 16 workers."""
    seed: int


@dataclass(frozen=True)
class CellResult:
    """Result of one run."""

    metrics: StreamMetrics
    migrations: int
    loans: int
    violations: int
    virtual_s: float
    messages: tuple[str, ...] = ()


def simulate(cell: Cell) -> CellResult:
    """Run one cell."""
    policy, profile = POLICIES[cell.policy], PROFILES[cell.profile]()
    counted = {"worker_max_sessions": None} if cell.policy in COUNTED else {}
    scale = StreamScale(
        workers=cell.workers,
        most_workers=cell.workers,
        slots=SLOTS,
        gather=policy.gather,
        placement=policy.placement,
        device=profile.device,
        host_workers=HOST_WORKERS if policy.lends else 0,
        worker_settings={**policy.worker, **counted},
        scheduler_settings=policy.scheduler,
    )
    plans = WORKLOADS[cell.workload](cell.seed, cell.streams, cell.rate, cell.workers)
    longest_s = plans[-1].arrives_s + LONGEST_TAIL_S
    records, run = run_streams(cell.seed, scale, plans, profile.start_buffer_s, longest_s)
    return CellResult(
        measure(records, run["virtual_s"] - WARM_UP_S),
        run["counts"]["moves"],
        run["counts"]["loans"],
        sum(run["violations"].values()),
        run["virtual_s"],
        tuple(run["messages"][:3]),
    )


@cache
def source_digest() -> str:
    """Return a digest of the installed code: a cell of other code is not this one's."""
    digest = hashlib.sha256()
    for folder in sorted(turboserve.__path__):
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class CellStore:
    """Finished cells in a folder, or none at all."""

    def __init__(self, folder: Path | None, on_cell: Callable[[Cell], None] = lambda cell: None) -> None:
        """`on_cell` is called for each cell whose result is wanted, once it is there."""
        self._folder, self._on_cell = folder, on_cell
        self._known: dict[Cell, CellResult] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, cells: Iterable[Cell], jobs: int) -> dict[Cell, CellResult]:
        """Return the result of each cell. Runs those that are not known, `jobs` at a time."""
        cells = list(dict.fromkeys(cells))
        missing = [cell for cell in cells if self._find(cell) is None]
        for cell in cells:
            if cell in self._known:
                self._on_cell(cell)
        for cell, result in _run(missing, jobs):
            self._known[cell] = result
            self._write(cell, result)
            self._on_cell(cell)
        return {cell: self._known[cell] for cell in cells}

    def _find(self, cell: Cell) -> CellResult | None:
        if cell not in self._known and self._folder is not None:
            file = self._file(cell)
            if file.exists():
                value: dict[str, Any] = json.loads(file.read_text())["result"]
                metrics = StreamMetrics(**value.pop("metrics"))
                self._known[cell] = CellResult(metrics, **{**value, "messages": tuple(value["messages"])})
        return self._known.get(cell)

    def _write(self, cell: Cell, result: CellResult) -> None:
        if self._folder is None:
            return
        file = self._file(cell)
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"cell": asdict(cell), "result": asdict(result)}, indent=1) + "\n")
        new.replace(file)

    def _file(self, cell: Cell) -> Path:
        assert self._folder is not None
        name = json.dumps([source_digest(), asdict(cell)], sort_keys=True)
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


def _run(cells: list[Cell], jobs: int) -> Iterator[tuple[Cell, CellResult]]:
    if jobs == 1 or len(cells) < 2:
        for cell in cells:
            yield cell, simulate(cell)
        return
    # Spawned, not forked: this process may have threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(simulate, cell): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()
