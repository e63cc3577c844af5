"""Results of benchmarks: one JSON object in a file, a table on the screen."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table


class BenchError(Exception):
    """A benchmark could not run. The message states the reason and what the user can do."""


def machine() -> dict[str, Any]:
    """Return a description of the machine on which the numbers were measured."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
    }


def compose(
    name: str, options: Mapping[str, Any], result: Mapping[str, Any], wall_s: float
) -> dict[str, Any]:
    """Return the object to write: the result, and the benchmark's name, time, machine and options."""
    return {
        "bench": name,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_s": round(wall_s, 3),
        "machine": machine(),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
        **result,
    }


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object.

    Raises BenchError if the file cannot be written or a number has no JSON form (NaN, infinity).
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.write_text(text + "\n")
        new.replace(path)
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"--json: {path} could not be written: {error}") from error


def table(result: Mapping[str, Any]) -> Table:
    """Return every number and text of `result`; dots join nested keys.

    Lists of more than 4 items are omitted.
    """
    shown = Table(show_header=False, box=None, pad_edge=False)
    shown.add_column(style="bold")
    shown.add_column()
    for key, value in _flat(result):
        shown.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    return shown


def percentile(values: list[float], share: float) -> float | None:
    """Return the value below which `share` (0 to 1) of `values` lie, interpolated; None for no values."""
    return float(np.quantile(values, share)) if values else None


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from _flat(item, f"{name}.")
        elif not isinstance(item, list | tuple) or len(item) <= 4:
            yield name, item


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
