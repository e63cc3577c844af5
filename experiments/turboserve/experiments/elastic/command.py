"""A real stack whose pool follows the load: time to scale out, harm, and cost compared with a fixed pool."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich import box
from rich.table import Table

from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.bench.report import BenchError, percentile
from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.rest import request
from turboserve.cli.stack.background import BackgroundStack, StackStartError
from turboserve.experiments.elastic.ramp import Ramp
from turboserve.experiments.elastic.watch import PoolWatch, unix_seconds
from turboserve.tasks import stop

SETTLE_LIMIT_S = 300.0
PRICE = 1.0


class Windows(StrEnum):
    """Which windows are in force."""

    SHORT = "short"
    """All windows have the same length, short enough for a ramp of three minutes to show both directions."""
    SHIPPED = "shipped"
    """The autoscaler's settings on this machine: its defaults, or the environment's values."""


@dataclass(frozen=True)
class ScaleIn:
    """Windows of a scale-in, in seconds."""

    name: str
    in_cooldown_s: float
    in_window_s: float
    peak_window_s: float

    @classmethod
    def of(cls, windows: Windows, short_s: float) -> ScaleIn:
        if windows is Windows.SHORT:
            return cls(windows.value, short_s, short_s, short_s)
        settings = AutoscalerSettings()
        return cls(
            windows.value,
            settings.scale_in_cooldown_s,
            settings.scale_in_window_s,
            settings.scale_peak_window_s,
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that set all windows explicitly, so that the report cannot be wrong."""
        return {
            "TURBOSERVE_SCALE_IN_COOLDOWN_S": str(self.in_cooldown_s),
            "TURBOSERVE_SCALE_IN_WINDOW_S": str(self.in_window_s),
            "TURBOSERVE_SCALE_PEAK_WINDOW_S": str(self.peak_window_s),
        }

    def figures(self) -> dict[str, Any]:
        """Return the windows for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        times = f"{self.in_window_s:g}, {self.in_cooldown_s:g} and {self.peak_window_s:g} s"
        return f"{self.name}: window, cool-down and peak window of {times}"


def run(
    sessions: Annotated[
        int, typer.Option(min=2, max=64, help="Number of sessions at the top of the ramp.")
    ] = 5,
    most: Annotated[
        int, typer.Option(min=2, max=16, help="Maximum number of workers. The minimum is 1.")
    ] = 3,
    per_worker: Annotated[int, typer.Option(min=1, max=16, help="Number of session slots per worker.")] = 2,
    step_s: Annotated[
        float, typer.Option(min=1.0, help="Time between two arrivals or departures, in seconds.")
    ] = 8.0,
    hold_s: Annotated[float, typer.Option(min=1.0, help="Time at the top of the ramp, in seconds.")] = 40.0,
    tail_s: Annotated[
        float, typer.Option(min=1.0, help="Time with one session after the ramp, in seconds.")
    ] = 60.0,
    windows: Annotated[
        Windows, typer.Option(help="Windows of a scale-in: short ones, or the autoscaler's defaults.")
    ] = Windows.SHORT,
    cooldown_s: Annotated[
        float,
        typer.Option(
            min=1.0, help="Cool-down, scale-in window and peak window if the windows are short, in seconds."
        ),
    ] = 15.0,
) -> dict[str, Any]:
    """Play a ramp of toyworld sessions up and down on a pool of 1 to `most` local workers.

    Measures the time of a scale-out from the decision to ready and to the first chunk there, the harmed
    sessions, the lost chunks, and the cost compared with a fixed pool of `most` workers.
    """
    scale_in = ScaleIn.of(windows, cooldown_s)
    environment = {
        **scale_in.environment,
        "TURBOSERVE_WORKER_MAX_SESSIONS": str(per_worker),
        "TURBOSERVE_PRICES": json.dumps({"*": PRICE}),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="turboserve-elastic-") as directory:
        stack = BackgroundStack(Path(directory) / "data", "--workers", f"1..{most}", environment=environment)
        try:
            with stack:
                found = asyncio.run(_measure(stack.url, sessions, most, step_s, hold_s, tail_s))
                return {"windows": scale_in.figures(), **found}
        except StackStartError as error:
            raise BenchError(f"the stack did not start:\n{error}") from None
        except (httpx.HTTPError, ProblemError, TimeoutError, OSError) as error:
            raise BenchError(f"{str(error) or type(error).__name__}\n{stack.output[-2000:]}") from error


async def _measure(
    url: str, sessions: int, most: int, step_s: float, hold_s: float, tail_s: float
) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as api:
        watch, ramp = PoolWatch(api), Ramp(api)
        looking = asyncio.create_task(watch.run())
        try:
            began_at = time.time()
            for _ in range(sessions):
                await ramp.come()
                await asyncio.sleep(step_s)
            await asyncio.sleep(hold_s)
            # The oldest sessions leave first: those that stay are on the workers that were added later.
            for viewer in ramp.open[:-1]:
                await ramp.leave(viewer)
                await asyncio.sleep(step_s)
            await asyncio.sleep(tail_s)
            await _until_smallest(watch)
            shares = await request(api, "GET", "/v1/cost")
            lasted_s = unix_seconds(shares["at"]) - began_at
            await ramp.leave_all()
        finally:
            await stop(looking)
            await ramp.leave_all()
    return _report(watch, ramp, shares, most, lasted_s, began_at)


async def _until_smallest(watch: PoolWatch) -> None:
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while not (watch.last.get("ready") == 1 and watch.last.get("draining") == 0):
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(0.5)


def _report(
    watch: PoolWatch, ramp: Ramp, cost: Mapping[str, Any], most: int, lasted_s: float, began_at: float
) -> dict[str, Any]:
    outs = watch.scale_outs(ramp.all_chunks())
    fixed_s = most * lasted_s
    spent_s = cost["total"]["gpu_seconds"]
    return {
        "sessions": len(ramp.viewers),
        "sessions_refused": ramp.refused,
        "sessions_harmed": len(ramp.harmed()),
        "harmed": ramp.harmed(),
        "chunks": sum(len(viewer.chunks) for viewer in ramp.viewers),
        "chunks_lost": sum(viewer.player.lost for viewer in ramp.viewers),
        "chunks_repeated": sum(viewer.player.repeated for viewer in ramp.viewers),
        "stalls": sum(viewer.player.stalls for viewer in ramp.viewers),
        "stall_s": round(sum(viewer.player.stall_s for viewer in ramp.viewers), 3),
        "moves": ramp.migrations(),
        "scale_out_s": {
            name: _figures([one[f"{name}_s"] for one in outs])
            for name in ("launch", "start_up", "ready", "first_chunk")
        },
        "scale_outs": outs,
        "decisions": {"out": watch.count("out"), "in": watch.count("in")},
        "actions": watch.drains(),
        "smallest_again": watch.last.get("ready") == 1 and watch.last.get("draining") == 0,
        "timeline": [
            {"s": round(at - began_at, 1), "target": target, "ready": ready}
            for at, target, ready in watch.sizes
        ],
        "cost": {
            "gpu_seconds": round(spent_s, 1),
            "starting_gpu_seconds": round(sum(k["starting_gpu_seconds"] for k in cost["kinds"]), 1),
            "sessions_gpu_seconds": round(cost["used"]["gpu_seconds"], 1),
            "fixed_gpu_seconds": round(fixed_s, 1),
            "fixed_workers": most,
            "saved_percent": round(100.0 * (1.0 - spent_s / fixed_s), 1),
        },
        "lasted_s": round(lasted_s, 1),
    }


def _figures(values: list[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {"p50": percentile(known, 0.5), "max": max(known, default=None)}


def table(result: Mapping[str, Any]) -> Table:
    """Format the result of `run`."""
    shown = Table("", "p50", "max", box=box.SIMPLE, title=f"ramp of {result['sessions']} sessions")
    for name, what in (
        ("launch", "decision → launch, s"),
        ("start_up", "launch → ready, s"),
        ("ready", "decision → ready, s"),
        ("first_chunk", "decision → first chunk on the new worker, s"),
    ):
        figures = result["scale_out_s"][name]
        shown.add_row(what, *("" if figures[k] is None else f"{figures[k]:.1f}" for k in ("p50", "max")))
    for key in ("sessions_harmed", "chunks", "chunks_lost", "chunks_repeated", "stalls", "moves"):
        shown.add_row(key, str(result[key]), "")
    shown.add_row("scale-in windows", str(ScaleIn(**result["windows"])), "")
    cost = result["cost"]
    shown.add_row("worker-seconds", f"{cost['gpu_seconds']:.0f}", "")
    shown.add_row(
        f"worker-seconds of {cost['fixed_workers']} fixed workers", f"{cost['fixed_gpu_seconds']:.0f}", ""
    )
    shown.add_row("saved", f"{cost['saved_percent']:.1f} %", "")
    shown.add_row(
        "target over time", " ".join(f"{t['s']:.0f}s:{t['target']}" for t in result["timeline"]), ""
    )
    return shown
