"""Results of cells. Those that a folder keeps are not computed again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import turboserve
from turboserve.experiments.slack import cells
from turboserve.experiments.slack.cells import Cell, CellResult, CprBounds
from turboserve.experiments.slack.metrics import StreamMetrics
from turboserve.simulation.huge_pages import huge_pages_for_children

RESULT, BOUNDS = "result", "bounds"
"""Kinds of kept files."""


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
    """Computes cells, in several processes if asked, and keeps finished ones in a folder, if there is one.

    Threads may share it.
    """

    def __init__(
        self, folder: Path | None, jobs: int = 1, on_cell: Callable[[Cell], None] = lambda cell: None
    ) -> None:
        """`jobs`: number of processes; with 1, this one. `on_cell`: called for each cell once it is known."""
        self._folder, self._on_cell = folder, on_cell
        self._results: dict[Cell, CellResult] = {}
        self._bounds: dict[Cell, CprBounds] = {}
        self._source = source_digest()
        """As the run begins: each process imports the code at once."""
        self._open = ExitStack()
        # Spawned, not forked: this process may have threads.
        self._pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> CellStore:
        if self._pool is not None:
            # The pool starts its processes when they are needed.
            self._open.enter_context(huge_pages_for_children())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._open.close()

    def run(self, wanted: Iterable[Cell]) -> dict[Cell, CellResult]:
        """Return the result of each cell."""
        each = list(dict.fromkeys(wanted))
        missing = [cell for cell in each if not self._known(cell)]
        for cell in each:
            if cell in self._results:
                self._on_cell(cell)
        if self._pool is None:
            for cell in missing:
                self._keep(cell, cells.simulate(cell))
        else:
            futures = {self._pool.submit(cells.simulate, cell): cell for cell in missing}
            for future in as_completed(futures):
                self._keep(futures[future], future.result())
        return {cell: self._results[cell] for cell in each}

    def bounds(self, cell: Cell, too_low: float, enough: float) -> CprBounds:
        """Return the bounds of a cell's CPR: below `too_low`, at least `enough`, or both equal."""
        if self._known(cell):
            cpr = self._results[cell].metrics.cpr
            found = CprBounds(cpr, cpr)
        else:
            kept = self._kept_bounds(cell)
            decisive = kept is not None and (
                kept.least == kept.most or kept.most < too_low or kept.least >= enough
            )
            found = kept if kept is not None and decisive else self._new_bounds(cell, too_low, enough)
        self._on_cell(cell)
        return found

    def _new_bounds(self, cell: Cell, too_low: float, enough: float) -> CprBounds:
        if self._pool is None:
            found = cells.simulate_bounds(cell, too_low, enough)
        else:
            found = self._pool.submit(cells.simulate_bounds, cell, too_low, enough).result()
        self._bounds[cell] = found
        self._write(BOUNDS, cell, asdict(found))
        return found

    def _keep(self, cell: Cell, result: CellResult) -> None:
        self._results[cell] = result
        self._write(RESULT, cell, asdict(result))
        self._on_cell(cell)

    def _known(self, cell: Cell) -> bool:
        """Whether the result is known. Reads it, if the folder has it."""
        if cell not in self._results and (value := self._read(RESULT, cell)) is not None:
            metrics = StreamMetrics(**value.pop("metrics"))
            self._results[cell] = CellResult(metrics, **{**value, "messages": tuple(value["messages"])})
        return cell in self._results

    def _kept_bounds(self, cell: Cell) -> CprBounds | None:
        if cell not in self._bounds and (value := self._read(BOUNDS, cell)) is not None:
            self._bounds[cell] = CprBounds(**value)
        return self._bounds.get(cell)

    def _read(self, kind: str, cell: Cell) -> dict[str, Any] | None:
        if self._folder is None or not (file := self._file(self._folder, kind, cell)).exists():
            return None
        value: dict[str, Any] = json.loads(file.read_text())[kind]
        return value

    def _write(self, kind: str, cell: Cell, value: dict[str, Any]) -> None:
        if self._folder is None:
            return
        file = self._file(self._folder, kind, cell)
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"cell": asdict(cell), kind: value}, indent=1) + "\n")
        new.replace(file)

    def _file(self, folder: Path, kind: str, cell: Cell) -> Path:
        name = json.dumps([self._source, asdict(cell), kind], sort_keys=True)
        return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
