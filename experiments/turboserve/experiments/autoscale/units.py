"""Independent parts of a benchmark, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any


@dataclass(frozen=True)
class Unit:
    """One call. Its figures do not depend on where or when it runs."""

    case: str
    key: str
    """Name among the case's units; empty if the case has one unit."""
    function: Callable[..., Any]
    """A function of a module, so that another process can import it."""
    arguments: tuple[Any, ...]


def run_all(units: Sequence[Unit], jobs: int) -> dict[Unit, Any]:
    """Run the units in this order, at most `jobs` at a time. Returns the result of each."""
    if jobs == 1 or len(units) == 1:
        return {unit: unit.function(*unit.arguments) for unit in units}
    # Spawned, not forked: this process may have threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {unit: pool.submit(unit.function, *unit.arguments) for unit in units}
        return {unit: future.result() for unit, future in futures.items()}
