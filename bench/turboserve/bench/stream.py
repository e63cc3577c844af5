"""Several viewers of a running stack: time to the first chunk, gaps between chunks, stalls, losses.

Each viewer opens a session with its own prompt, plays it with a virtual player, and changes the prompt
half-way. All times are of this machine's clock, so the stack must run on this machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import BenchError
from turboserve.bench.streaming.measurement import BrokerTap, Measurement, SessionMeasurement
from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.rest import LIMITS
from turboserve.bench.streaming.transports import compare
from turboserve.bench.streaming.viewer import Viewer
from turboserve.tasks import stop

COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "cyan", "pink")
SHAPES = ("circle", "square", "triangle")
MOTIONS = ("left", "up", "right", "down")
TRANSPORTS = ("ws", "whep")
FIRST_CHUNK_LIMIT_S = 60.0
APPLIED_LIMIT_S = 30.0


class Transport(StrEnum):
    """What viewers are connected over."""

    WS = "ws"
    WHEP = "whep"
    BOTH = "both"


async def run(
    sessions: Annotated[int, typer.Option(min=1, max=256, help="Number of concurrent viewers.")] = 4,
    seconds: Annotated[
        float, typer.Option(min=2.0, help="Time that each viewer watches, in seconds.")
    ] = 60.0,
    url: Annotated[
        str | None, typer.Option(help="URL of the gateway. The default is the stack of --data.")
    ] = None,
    data: Annotated[
        Path, typer.Option(envvar="TURBOSERVE_DATA", help="Data directory of a running `turboserve up`.")
    ] = Path(".turboserve"),
    transport: Annotated[
        Transport | None,
        typer.Option(
            help="Measure the time from a prompt to its first pixel and the gateway's processor time for "
            "each second of a viewer, over this transport or over both in turn."
        ),
    ] = None,
    lead: Annotated[
        float, typer.Option(min=0.1, help="With --transport: the sessions' lead, in seconds.")
    ] = 0.75,
    added: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="With --transport: viewers that are then added to each session, to measure the gateway's "
            "processor time for one more viewer.",
        ),
    ] = 0,
) -> dict[str, Any]:
    """Watch a running stack with several virtual players: first chunk, chunk times, stalls, losses, prompts.

    With a stack of `turboserve up`, the same chunks are also read directly from its broker, as a baseline for
    the gateway's latency.
    """
    target = Target(url) if url is not None else Target.find(data)
    try:
        if transport is not None:
            chosen = TRANSPORTS if transport is Transport.BOTH else (transport.value,)
            return await compare(target.url, target.gateway_pid, chosen, sessions, seconds, lead, added)
        measurement = await measure(target, sessions, seconds)
    except ProblemError as problem:
        hint = (
            ": start the stack with more workers, or measure fewer sessions" if problem.status == 429 else ""
        )
        raise BenchError(f"{target.url} answered {problem}{hint}") from None
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        raise BenchError(f"{target.url}: {str(error) or type(error).__name__}") from error
    return measurement.report()


def table(result: Mapping[str, Any]) -> Table:
    """Format the result of `run`."""
    if "transports" in result:
        return transport_table(result)
    shown = Table(
        "",
        "p50",
        "p95",
        "max",
        title=f"{result['sessions']} sessions, {result['seconds']:g} s",
        box=box.SIMPLE,
    )
    rows = {
        "POST → first chunk, s": result["ttfc_s"],
        "interval between chunks, s": result["interarrival_s"],
        "worker → viewer, ms": _milli(result["gateway_overhead_s"]),
        "prompt → applied, s": result["prompt_applied_s"],
        "prompt → applied, chunks": result["prompt_applied_chunks"],
        "prompt → shown, s": result["prompt_visible_s"],
    }
    if result["baseline"] is not None:
        rows["worker → reader at the broker, ms"] = _milli(result["baseline"]["broker_s"])
        rows["latency added by the gateway, ms"] = _milli(result["baseline"]["gateway_share_s"])
    for name, figures in rows.items():
        shown.add_row(name, *(_number(figures.get(key)) for key in ("p50", "p95", "max")))
    for key in ("chunks", "chunks_lost", "chunks_repeated", "stalls", "stall_s"):
        shown.add_row(key, str(result[key]), "", "")
    return shown


def transport_table(result: Mapping[str, Any]) -> Table:
    """Format the comparison of transports."""
    title = f"{result['sessions']} sessions, {result['seconds']:g} s, lead {result['lead_s']:g} s"
    shown = Table(
        "prompt → first pixel, s", "p50", "p95", "max", "gateway, µs/s", title=title, box=box.SIMPLE
    )
    if result.get("added"):
        shown.add_column("one more viewer, µs/s")
    for name, found in result["transports"].items():
        seen = (_number(found["prompt_seen_s"][key]) for key in ("p50", "p95", "p100"))
        costs = ("gateway_cpu_per_viewer_us", *(("gateway_cpu_per_added_us",) if result.get("added") else ()))
        shown.add_row(name, *seen, *(_number(found[key]) for key in costs))
    compared = result.get("webrtc_to_websocket", {})
    if compared.get("viewer") is not None:
        shown.add_row(
            "whep / ws", "", "", "", *(_number(compared[key]) for key in ("viewer", "added")[: len(costs)])
        )
    return shown


def _milli(figures: Mapping[str, float | None]) -> dict[str, float | None]:
    return {key: None if value is None else value * 1000 for key, value in figures.items()}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


@dataclass(frozen=True)
class Target:
    """A running stack. `nats_url` names a broker user that may read chunks; None means no baseline."""

    url: str
    nats_url: str | None = None
    gateway_pid: int | None = None
    """The first gateway's process, if it runs on this machine."""

    @classmethod
    def find(cls, data: Path) -> Target:
        """Find the stack that `turboserve up` runs on the data directory `data`. Raises BenchError."""
        try:
            record = json.loads((data / "stack.json").read_text())
            gateway = record.get("processes", {}).get("gateway", {})
            return cls(record["url"], record.get("nats_url"), gateway.get("pid"))
        except (OSError, ValueError, KeyError):
            raise BenchError(
                f"no stack is running on {data.absolute()}: start one with `turboserve up`, or set --url"
            ) from None


async def measure(target: Target, sessions: int, seconds: float) -> Measurement:
    """Watch `sessions` sessions for `seconds` each. Raises ProblemError, TimeoutError or OSError."""
    measurement = Measurement(seconds)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(httpx.AsyncClient(base_url=target.url, limits=LIMITS))
        if target.nats_url is not None:
            tap = await stack.enter_async_context(BrokerTap(target.nats_url))
            measurement.broker_at = tap.received_at
        tasks = [asyncio.create_task(_watch(api, number, seconds)) for number in range(sessions)]
        try:
            measurement.watched = list(await asyncio.gather(*tasks))
        finally:
            # The first failure ends the run; every session is deleted.
            await stop(*tasks)
    return measurement


def prompts(number: int) -> tuple[str, str]:
    """Return the two prompts of session `number`; neighbors differ in color, shape and motion."""
    colour, after = COLOURS[number % 8], COLOURS[(number + 3) % 8]
    return (
        f"a {colour} {SHAPES[number % 3]} moving {MOTIONS[number % 4]}",
        f"a {after} {SHAPES[(number + 1) % 3]} moving {MOTIONS[(number + 1) % 4]}",
    )


async def _watch(api: httpx.AsyncClient, number: int, seconds: float) -> SessionMeasurement:
    first, second = prompts(number)
    asked_s = time.monotonic()
    viewer = await Viewer.create(api, first, seed=number)
    try:
        one = SessionMeasurement(viewer, asked_s)
        async with viewer.watching():
            await viewer.until(
                lambda: viewer.connections > 0 and viewer.last >= 0, FIRST_CHUNK_LIMIT_S, "chunk"
            )
            begun_s = time.monotonic()
            await asyncio.sleep(seconds / 2)
            one.switch = await viewer.submit(second)
            applied = await viewer.event("prompt.applied", APPLIED_LIMIT_S, prompt_id=one.switch.prompt_id)
            one.applied_s, one.applied_chunk = applied["received_s"], applied["chunk_index"]
            while (left_s := begun_s + seconds - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, 0.02))
                _note_visible(one)
            viewer.player.tick(time.monotonic())
        return one
    finally:
        await viewer.delete()


def _note_visible(one: SessionMeasurement) -> None:
    player = one.viewer.player
    now_s = time.monotonic()
    player.tick(now_s)
    if one.visible_s is None:
        for chunk in reversed(one.viewer.chunks):
            if chunk.index == one.applied_chunk and player.position_s >= chunk.start_s:
                one.visible_s = now_s
