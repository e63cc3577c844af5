"""Cells of the experiments: one call of a function each. Finished cells are kept in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from turboserve.experiments.slack.cell_store import source_digest


@dataclass(frozen=True)
class PaperCell:
    """One call. Its result is JSON. If it is kept, it does not depend on where or when it runs."""

    experiment: str
    key: str
    """Name among the experiment's cells."""
    function: Callable[..., Any]
    """A function of a module, so that another process can import it."""
    arguments: tuple[Any, ...] = ()
    kept: bool = True
    """False: the result depends on the machine (run times), so no folder keeps it, and every run measures."""

    @property
    def title(self) -> str:
        return f"{self.experiment} {self.key}"

    @property
    def digest(self) -> str:
        """Digest of the installed code, the function and its arguments."""
        function = f"{self.function.__module__}.{self.function.__qualname__}"
        name = json.dumps([source_digest(), function, self.arguments])
        return hashlib.sha256(name.encode()).hexdigest()[:24]


class ResultFolder:
    """Results of finished cells in a folder, or in memory alone. Cells that are not `kept` always run."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}
        """Results by digest: experiments may share cells."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, cells: Iterable[PaperCell], jobs: int, done: Callable[[str], None]) -> dict[PaperCell, Any]:
        """Return the result of each cell. Runs those whose results are not there, `jobs` at a time.

        `done` is called with the title of each cell that has its result.
        """
        cells = list(dict.fromkeys(cells))
        found = {cell: result for cell in cells if (result := self._read(cell)) is not None}
        for cell in found:
            done(cell.title)
        for cell, result in _run([cell for cell in cells if cell not in found], jobs):
            found[cell] = self._write(cell, result)
            done(cell.title)
        return found

    def _read(self, cell: PaperCell) -> Any:
        if not cell.kept:
            return None
        if cell.digest not in self._known and self._folder is not None:
            file = self._folder / f"{cell.digest}.json"
            if file.exists():
                self._known[cell.digest] = json.loads(file.read_text())["result"]
        return self._known.get(cell.digest)

    def _write(self, cell: PaperCell, result: Any) -> Any:
        """Keep the result. Returns it as it would be read."""
        text = json.dumps({"cell": [cell.title, cell.arguments], "result": result}, indent=1)
        if not cell.kept:
            return json.loads(text)["result"]
        if self._folder is not None:
            file = self._folder / f"{cell.digest}.json"
            new = file.with_suffix(".new")
            new.write_text(text + "\n")
            new.replace(file)
        self._known[cell.digest] = json.loads(text)["result"]
        return self._known[cell.digest]


def _run(cells: list[PaperCell], jobs: int) -> Iterator[tuple[PaperCell, Any]]:
    if jobs == 1 or len(cells) < 2:
        for cell in cells:
            yield cell, cell.function(*cell.arguments)
        return
    # Spawned, not forked: this process may have threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(cell.function, *cell.arguments): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()
