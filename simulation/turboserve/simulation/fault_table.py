"""Formats the result of many seeds with faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turboserve.simulation.names import INVARIANTS


def fault_table(result: Mapping[str, Any]) -> RenderableType:
    """Format the violations by invariant, then the commands that replay the failing seeds."""
    shown = Table("invariant", "violations", "meaning", box=box.SIMPLE)
    for name, count in result["violations"].items():
        shown.add_row(name, str(count), INVARIANTS[name])
    settle, counts = result["settle_s"], result["counts"]
    notes = [
        f"{result['seeds']} seeds, {result['events']} events, {result['seeds_per_s']:.1f} seeds/s, "
        f"{result['seeds_per_cpu_s']:.1f} by CPU time; "
        + ", ".join(f"{name} {count}" for name, count in counts.items()),
    ]
    if settle["max"] is not None:
        notes.append(
            f"time from the last fault until everything runs: {settle['p50']:.1f} s (median), "
            f"{settle['max']:.1f} s (maximum); the bound is {settle['bound']:g} s"
        )
    for one in result["failing"]:
        notes.append(
            f"seed {one['seed']}: {'; '.join(one['messages'][:2]) or 'the traces of two runs differ'}"
        )
        notes.append(f"  replay: {one['replay']}")
    return Group(shown, Text("\n".join(notes)))
