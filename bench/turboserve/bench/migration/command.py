"""Migration of a playing session between two real workers: stall, bytes, throughput, equality of the video.

A session plays in real time and migrates back and forth between two workers.

- **Stall** of a migration: how much later than usual the first chunk made at the target arrives. A chunk is
  due when the viewer's playhead comes within `max_lead` of its start. Usual is the median time from due to
  arrival over the chunks that no migration touched, of the same session under the same viewer. The stall is
  thus the delay against the arrival without the migration. The viewer, who is seconds behind, notices only a
  stall longer than that.
- `viewer_stall_s`: the part of a delay that the viewer notices. It is the largest delay of a chunk beyond the
  time at which its playback is due.
- `first_chunk_s`: the time to compute the first chunk at the target, of which `chunk_s` is usual. The rest of
  a stall is waiting.
- `kept_up`: whether the machine keeps up with the viewer. If not, a stall means nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.migration.stack import WORKERS, MigrationStack, Processes, connected, processes
from turboserve.bench.migration.watched_session import SETTLED, WatchedSession, keeps_up, stalls
from turboserve.bench.paced.device import PacedDevice
from turboserve.bench.report import BenchError, percentile

MAX_LEAD_S = 3.0
PAUSE_CHUNKS = 4
"""Number of chunks between two migrations."""
BYTES = "turboserve_worker_transfer_received_bytes_total"
SECONDS = "turboserve_worker_transfer_time_seconds_total"
SEED = 7


def run(
    migrations: Annotated[
        int, typer.Option("--moves", min=1, max=100, help="Number of migrations per session.")
    ] = 6,
    backends: Annotated[
        str, typer.Option(help="Transfer backends, separated by commas: gloo, nixl, shm.")
    ] = "gloo,nixl",
    padded_bytes: Annotated[
        int,
        typer.Option(min=0, help="Size of the large state in bytes; 0 measures toyworld's own state only."),
    ] = 1 << 30,
) -> dict[str, Any]:
    """Migrate a playing session between two workers: stall, bytes, throughput, equality of the video.

    Starts servers, a state store and workers of its own.
    """
    chosen = [name.strip() for name in backends.split(",") if name.strip()]
    if not chosen or set(chosen) - {"gloo", "nixl", "shm"}:
        raise BenchError("--backends: choose from gloo, nixl, shm")
    if "nixl" in chosen and importlib.util.find_spec("nixl") is None:
        raise BenchError("--backends: nixl needs the worker's extra: pip install turboserve-worker[nixl]")
    found: dict[str, Any] = {}
    for state, pad_bytes in (("toyworld", 0), ("padded", padded_bytes)):
        if state == "padded" and not pad_bytes:
            continue
        found[state] = {name: _measure(name, migrations, pad_bytes) for name in chosen}
    return {"moves": migrations, "padded_bytes": padded_bytes, "states": found}


def table(result: Mapping[str, Any]) -> Table:
    """Format the result of `run`."""
    shown = Table(
        "state",
        "backend",
        "stall p50, ms",
        "stall max, ms",
        "stall / chunk",
        "viewer's stall, ms",
        "state, MB",
        "copied, MB",
        "Gbit/s",
        "identical video",
        box=box.SIMPLE,
    )
    for state, by_backend in result["states"].items():
        for backend, one in by_backend.items():
            shown.add_row(
                state,
                backend,
                f"{one['stall_s']['p50'] * 1e3:.1f}",
                f"{one['stall_s']['max'] * 1e3:.1f}",
                f"{one['stall_over_chunk']:.1%}" if one["kept_up"] else "fell behind",
                f"{one['viewer_stall_s'] * 1e3:.1f}",
                f"{one['state_bytes'] / 1e6:.2f}",
                f"{one['bytes_moved'] / 1e6:.2f}",
                f"{one['transfer_gbps']:.2f}",
                "yes" if one["frames_identical"] else "NO",
            )
    return shown


def _measure(backend: str, migrations: int, pad_bytes: int) -> dict[str, Any]:
    environment = {
        "TURBOSERVE_TRANSFER_BACKENDS": f'["{backend}"]',
        "TURBOSERVE_REQUEST_DEADLINE_S": "30",
        "TURBOSERVE_MAX_LEAD_S": f"{MAX_LEAD_S:g}",
        "TURBOSERVE_WORKER_MAX_SESSIONS": "2",
        "TURBOSERVE_MEMORY_BYTES": str((2 << 30) + 3 * pad_bytes),
    }
    with (
        tempfile.TemporaryDirectory(prefix="turboserve-bench-") as folder,
        processes(Path(folder) / "data", environment, PacedDevice(state_bytes=pad_bytes)) as started,
    ):
        return asyncio.run(_on(started, migrations))


async def _on(started: Processes, migrations: int) -> dict[str, Any]:
    async with connected(started) as on:
        return await _migrated(on, migrations)


async def _migrated(on: MigrationStack, migrations: int) -> dict[str, Any]:
    play = WatchedSession(on)
    await play.begin(WORKERS[0], SEED)
    reports = []
    await play.until(SETTLED + PAUSE_CHUNKS)
    for _ in range(migrations):
        report = await play.migrate()
        reports.append(report)
        await play.until(max(len(play.chunks), report.next_chunk) + PAUSE_CHUNKS)
    count = len(play.chunks)
    await play.end()
    stayed = WatchedSession(on)
    await stayed.begin(WORKERS[0], SEED)
    await stayed.until(count)
    await stayed.end()
    late = play.lateness(MAX_LEAD_S)
    extra = stalls(late, [report.next_chunk for report in reports])
    chunk_s = statistics.median(chunk.header.compute_s for chunk in play.chunks.values())
    seconds = sum(on.metric(worker, SECONDS) for worker in WORKERS)
    copied = sum(on.metric(worker, BYTES) for worker in WORKERS)
    return {
        "stall_s": {
            "p50": percentile(extra, 0.5),
            "max": max(extra),
            "all": extra,
        },
        "stall_over_chunk": (percentile(extra, 0.5) or 0.0) / chunk_s,
        "chunk_s": chunk_s,
        "first_chunk_s": statistics.median(
            play.chunks[report.next_chunk].header.compute_s for report in reports
        ),
        "kept_up": keeps_up(late, play.chunks[1].header.end_s - play.chunks[1].header.start_s),
        "viewer_stall_s": max(0.0, max(late.values()) - MAX_LEAD_S),
        "lateness_s": {
            "p50": percentile(list(late.values()), 0.5),
            "p95": percentile(list(late.values()), 0.95),
        },
        "bytes_moved": statistics.median(report.bytes_copied for report in reports),
        "state_bytes": statistics.median(report.state_bytes for report in reports),
        "move_s": statistics.median(report.seconds for report in reports),
        "transfer_gbps": 8e-9 * copied / seconds if seconds else 0.0,
        "frames_identical": all(
            play.chunks[index].data == stayed.chunks[index].data for index in range(count)
        ),
        "chunks_compared": count,
        "makers": len({chunk.header.worker for chunk in play.chunks.values()}),
    }
