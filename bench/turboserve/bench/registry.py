"""Every installed benchmark by name.

A distribution offers a benchmark under the entry-point group `turboserve.benchmarks`: its name and a module.

    [project.entry-points."turboserve.benchmarks"]
    engine = "turboserve.bench.engine.command"

The module has

- a docstring, whose first line states what the benchmark measures. `turboserve bench` lists this line.
- `run(...) -> dict[str, Any]` (or a coroutine function). Its parameters are the command's options, annotated
  for typer. Its docstring is the command's help. Its result is written as JSON under the same keys. `run`
  raises `report.BenchError` or `typer.BadParameter` for errors that the user must correct, and leaves nothing
  running.
- `table(result) -> RenderableType` (optional). Formats the result for the terminal; the default is
  `report.table`.

A module is imported only when its benchmark runs: some need torch, which takes seconds to import.
"""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

GROUP = "turboserve.benchmarks"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, as `turboserve bench` lists it."""

    name: str
    module: str

    @property
    def summary(self) -> str:
        """First line of the module's docstring. Its packages are imported, the module itself is not.

        Raises ImportError if the module is not installed.
        """
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module named {self.module!r}", name=self.module)
        document = ast.get_docstring(ast.parse(Path(spec.origin).read_text()))
        return (document or "").partition("\n")[0]

    def load(self) -> ModuleType:
        """Import the module. Raises ImportError."""
        return importlib.import_module(self.module)


class UnknownBenchmarkError(LookupError):
    """No installed distribution offers a benchmark of this name."""

    def __init__(self, name: str, installed: list[str]) -> None:
        super().__init__(f"unknown benchmark {name!r}; installed: {', '.join(installed)}")


def benchmarks() -> dict[str, Benchmark]:
    """Return the installed benchmarks by name, sorted. Reads the metadata of all distributions."""
    return {
        point.name: Benchmark(point.name, point.value)
        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)
    }


def find(name: str) -> Benchmark:
    """Return the benchmark `name`. Raises UnknownBenchmarkError."""
    installed = benchmarks()
    if name not in installed:
        raise UnknownBenchmarkError(name, [*installed])
    return installed[name]
