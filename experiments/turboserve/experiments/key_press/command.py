"""From the press of an arrow key to the pixel that shows it, in a browser that plays a steered session.

A headless Chromium opens the player page, chooses the shortest lead, and steers a figure with arrow keys.
Each frame on the screen is captured with its time. The answer to a press is the first frame in which the
figure moves in the new direction.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import BenchError, percentile
from turboserve.cli.stack.background import BackgroundStack, StackStartError
from turboserve.experiments.key_press.motion import first_answer
from turboserve.experiments.key_press.page import TRANSPORTS, Press, browser, press_keys
from turboserve.experiments.progress import progress_bar

MODEL = "toyworld-live"
PARTS = {
    "request": "press → accepted",
    "boundary": "accepted → chunk begun",
    "chunk": "chunk begun → in the log",
    "delivery": "in the log → in the page",
    "player": "in the page → on screen",
}


class Transport(StrEnum):
    """How the page plays."""

    WEBSOCKET = "websocket"
    WEBRTC = "webrtc"
    BOTH = "both"


async def run(
    presses: Annotated[int, typer.Option(min=1, max=1000, help="Presses over each transport.")] = 20,
    transport: Annotated[Transport, typer.Option(help="How the page plays: over one, or each in turn.")] = (
        Transport.BOTH
    ),
    model: Annotated[str, typer.Option(help="Model of the stack that is started.")] = MODEL,
    url: Annotated[
        str | None, typer.Option(help="URL of a running gateway. The default is a stack of its own.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws the directions.")] = 0,
) -> dict[str, Any]:
    """Measure the time from key presses to pixels at the shortest lead, and what it consists of."""
    chosen = [*TRANSPORTS] if transport is Transport.BOTH else [transport.value]
    with tempfile.TemporaryDirectory(prefix="turboserve-key-press-") as folder:
        options = ("--workers", "1", "--model", model)
        stack = nullcontext() if url is not None else BackgroundStack(Path(folder) / "data", *options)
        try:
            with stack as started:
                address = url if started is None else started.url
                assert address is not None
                return await measure(address, chosen, presses, seed)
        except StackStartError as error:
            raise BenchError(f"the stack did not start: {error}") from None


async def measure(
    url: str, transports: Sequence[str], presses: int, seed: int, chromium: Any = None
) -> dict[str, Any]:
    """Press keys on the page of the gateway at `url`. `chromium`: Playwright's browser; None: start one."""
    found: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        used = chromium if chromium is not None else await stack.enter_async_context(browser())
        with progress_bar(len(transports)) as done:
            for transport in transports:
                found[transport] = report(await press_keys(used, url, transport, presses, seed))
                done(transport)
    return {"presses": presses, "transports": found}


def report(presses: Sequence[Press]) -> dict[str, Any]:
    """Return the figures of presses over one transport, seconds."""
    delays: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    for press in presses:
        if press.pressed_s is None:
            continue
        shown_s = first_answer(press.frames, press.direction, press.pressed_s)
        if shown_s is None:
            continue
        delays.append(shown_s - press.pressed_s)
        marks = (
            press.pressed_s,
            press.accepted_s,
            press.begun_s,
            press.published_s,
            press.received_s,
            shown_s,
        )
        for name, (before, after) in zip(PARTS, pairwise(marks), strict=True):
            if before is not None and after is not None:
                parts[name].append(after - before)
    return {
        "presses": len(presses),
        "shown": len(delays),
        "key_to_pixel_s": _figures(delays),
        "parts_s": {name: _figures(values) for name, values in parts.items()},
    }


def _figures(values: list[float]) -> dict[str, float | None]:
    found = {f"p{share}": percentile(values, share / 100) for share in (50, 90, 100)}
    return {name: None if value is None else round(value, 4) for name, value in found.items()}


def table(result: Mapping[str, Any]) -> Table:
    """Format the result of `run`."""
    shown = Table(box=box.SIMPLE)
    shown.add_column("s", no_wrap=True)
    for name in result["transports"]:
        shown.add_column(f"{name} p50", justify="right")
        shown.add_column("p90", justify="right")
        shown.add_column("most", justify="right")
    rows = {"press → pixel": "key_to_pixel_s"} | {text: name for name, text in PARTS.items()}
    for text, name in rows.items():
        figures = [
            found[name] if name in found else found["parts_s"][name]
            for found in result["transports"].values()
        ]
        shown.add_row(text, *(_number(each[share]) for each in figures for share in ("p50", "p90", "p100")))
    answered = [
        cell
        for each in result["transports"].values()
        for cell in (f"{each['shown']}/{each['presses']}", "", "")
    ]
    shown.add_row("answered presses", *answered)
    return shown


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
