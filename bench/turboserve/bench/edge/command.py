"""HTTP servers under attack before a login, and their speed at delivering chunks: the gateway's and others.

One small application, which delivers chunks as the gateway does, runs on each server in turn, for several
rounds, so that other load on the machine affects all alike. `paced` is 20 viewers with a chunk of 100 kB
every 0.1 s. `unpaced` is 4 viewers that receive chunks as fast as they read. `against_uvicorn` compares the
medians with uvicorn as the gateway ran it before it had limits. On a busy machine, processor time is more
reliable than the clock.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Annotated, Any

import typer
import websockets
from rich import box
from rich.table import Table

from turboserve.bench.edge import attacks
from turboserve.bench.edge.serve import KINDS
from turboserve.bench.report import BenchError, percentile

START_S = 30.0
PACED, UNPACED = (20, 0.1), (4, 0.0)
"""Viewers, and seconds between two chunks."""
HEADER_BYTES = 64_000_000
FLOOD_S = 6.0
HALF_OPEN = 100
DESCRIPTORS = 256
BEGINNINGS = {
    "idle": b"",
    "half_head": b"GET / HTTP/1.1\r\nHost: here\r\nX-A: ",
    "half_body": b"POST /body HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\nx",
}


def run(
    servers: Annotated[
        str, typer.Option(help="Servers to measure, separated by commas.")
    ] = "gateway,uvicorn",
    rounds: Annotated[
        int, typer.Option(min=1, max=50, help="Number of rounds; the result is their median.")
    ] = 3,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of one measurement, in seconds.")] = 4.0,
    patience_s: Annotated[
        float, typer.Option(min=1.0, help="Time until half-open connections are counted, in seconds.")
    ] = 40,
) -> dict[str, Any]:
    """Attack HTTP servers on loopback, and measure how they deliver chunks without an attack.

    `hypercorn` and `granian` must be installed to be measured.
    """
    kinds = [name.strip() for name in servers.split(",") if name.strip()]
    if not kinds or set(kinds) - set(KINDS):
        raise BenchError(f"--servers: choose from {', '.join(KINDS)}")
    for kind in kinds:
        package = {"gateway": "uvicorn", "uvicorn-h11": "uvicorn"}.get(kind, kind)
        if importlib.util.find_spec(package) is None:
            raise BenchError(f"--servers: {kind} is not installed")
    delivery: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            with _running(kind) as (pid, address):
                delivery[kind].append(asyncio.run(_deliver(pid, address, seconds)))
    found: dict[str, Any] = {}
    for kind in kinds:
        medians = {key: statistics.median(one[key] for one in delivery[kind]) for key in delivery[kind][0]}
        found[kind] = {"delivery": medians, "attacks": _attack(kind, patience_s)}
    if "uvicorn" in found:
        before = found["uvicorn"]["delivery"]
        for one in found.values():
            one["against_uvicorn"] = {key: value / before[key] for key, value in one["delivery"].items()}
    return {"servers": found}


def table(result: Mapping[str, Any]) -> Table:
    """Format the result of `run`."""
    servers: Mapping[str, Any] = result["servers"]
    shown = Table("", *servers, box=box.SIMPLE)
    for part in ("delivery", "against_uvicorn", "attacks"):
        for key in next(iter(servers.values())).get(part, {}):
            values = [one[part][key] for one in servers.values()]
            shown.add_row(
                f"{key}, ratio" if part == "against_uvicorn" else key,
                *(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values),
            )
    return shown


@contextmanager
def _running(kind: str, descriptors: int | None = None) -> Iterator[tuple[int, attacks.Address]]:
    """Run the server in a process of its own; yields its pid and address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address: attacks.Address = free.getsockname()
    arguments = [kind, str(address[1]), *([str(descriptors)] if descriptors else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "turboserve.bench.edge.serve", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        while not attacks.answers(address, "/", 1.0):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"{kind} did not start")
            time.sleep(0.1)
        yield process.pid, address
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


async def _deliver(pid: int, address: attacks.Address, seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, (viewers, interval_s) in (("paced", PACED), ("unpaced", UNPACED)):
        used_s = attacks.cpu_s(pid)
        watching = (_watch(address, interval_s, seconds) for _ in range(viewers))
        taken = [one for each in await asyncio.gather(*watching) for one in each]
        found[f"{name}_mb_per_s"] = sum(size for _, size in taken) / seconds / 1e6
        found[f"{name}_cpu_ms_per_chunk"] = 1000 * (attacks.cpu_s(pid) - used_s) / max(1, len(taken))
        late_ms = [1000 * late_s for late_s, _ in taken]
        for share in (0.5, 0.99):
            found[f"{name}_p{share * 100:g}_ms"] = percentile(late_ms, share) or 0.0
    used_s = attacks.cpu_s(pid)
    found["requests_per_s"] = await _requests(address, seconds)
    count = max(1.0, found["requests_per_s"] * seconds)
    found["cpu_ms_per_request"] = 1000 * (attacks.cpu_s(pid) - used_s) / count
    return found


async def _watch(address: attacks.Address, interval_s: float, seconds: float) -> list[tuple[float, int]]:
    """Return the seconds from publication to arrival, and the bytes, of each chunk."""
    taken = []
    url = f"ws://{address[0]}:{address[1]}/stream?interval_s={interval_s}"
    async with websockets.connect(url, max_size=None, compression=None) as opened:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            published_at = json.loads(await opened.recv())["published_at"]
            size = len(await opened.recv())
            taken.append((time.time() - published_at, size))
    return taken


async def _requests(address: attacks.Address, seconds: float) -> float:
    """Return the sequential answers per second, over one connection for as long as the server keeps it."""
    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        reader, writer = await asyncio.open_connection(*address)
        # Some servers close a connection after a number of requests.
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while time.monotonic() - begun < seconds:
                writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(b'{"status":"ok"}'))
                count += 1
        writer.close()
    return count / (time.monotonic() - begun)


def _attack(kind: str, patience_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with _running(kind) as (pid, address):
        before = attacks.rss_bytes(pid)
        with attacks.endless_headers(address, HEADER_BYTES) as taken:
            time.sleep(1)
            found["headers_taken_mb"] = taken / 1e6
            found["headers_rss_mb"] = (attacks.rss_bytes(pid) - before) / 1e6
    with _running(kind) as (pid, address):
        before = attacks.rss_bytes(pid)
        with suppress(OSError), attacks.handshake(address, "/stream?interval_s=1000") as opened:
            attacks.ping_flood(opened, FLOOD_S)
            found["flood_rss_mb"] = (attacks.rss_bytes(pid) - before) / 1e6
        with ExitStack() as stack:
            held = {
                name: stack.enter_context(attacks.half_open(address, HALF_OPEN, beginning))
                for name, beginning in BEGINNINGS.items()
            }
            stack.enter_context(attacks.handshake(address, "/stream?interval_s=0"))
            time.sleep(patience_s)
            for name, connections in held.items():
                found[f"{name}_open"] = len(attacks.still_open(connections))
    with (
        _running(kind, DESCRIPTORS) as (_, address),
        attacks.half_open(address, DESCRIPTORS + 44, b""),
    ):
        found["stranger_answered"] = attacks.answers(address)
    return found
