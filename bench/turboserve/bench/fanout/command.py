"""Many viewers of one session at one gateway: processor time and delay, with one reader or one per viewer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from turboserve.bench.paced.device import PacedDevice
from turboserve.bench.paced.model import NAME
from turboserve.bench.report import BenchError, percentile
from turboserve.cli.embedded import Layout
from turboserve.cli.stack.background import BackgroundStack, StackStartError
from turboserve.free_ports import any_free

SHARED = "shared"
GATEWAYS = {SHARED: "turboserve.gateway", "separate": "turboserve.bench.fanout.gateway"}
"""Modes and their gateways' modules."""
READY_S = 180.0


def run(
    viewers: Annotated[int, typer.Option(min=1, help="Number of viewers.")] = 500,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds that are counted in each block.")] = 30.0,
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks per mode. The modes take turns.")] = 2,
    compare: Annotated[
        bool, typer.Option("--compare/--shared-only", help="Whether to measure the mode `separate` too.")
    ] = True,
) -> dict[str, Any]:
    """Watch one session through one gateway with many viewers, on a stack of its own.

    Each block starts a gateway, connects the viewers (WebSockets in one other process), and then counts: the
    gateway's processor time for each second of a viewer, and the delay from a chunk's publication to each
    viewer. `ended` counts the streams that the gateway ended, as it does when it is behind; the other figures
    are then of fewer viewers. In the mode `shared` the gateway is that of production, with one live
    subscription for all viewers; in the mode `separate` each viewer has its own. A paced worker makes the
    chunks.
    """
    if 2 * viewers + 200 > _descriptors():
        raise BenchError(f"{viewers} viewers need more open files than the limit of this process allows")
    with tempfile.TemporaryDirectory(prefix="turboserve-fanout-") as directory:
        stack = BackgroundStack(Path(directory) / "data", environment=_environment())
        try:
            with stack:
                found = _measure(
                    stack, viewers, seconds, blocks, GATEWAYS if compare else {SHARED: GATEWAYS[SHARED]}
                )
        except StackStartError as error:
            raise BenchError(f"the stack did not start:\n{error}") from None
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            raise BenchError(f"{str(error) or type(error).__name__}\n{stack.output[-2000:]}") from error
    return {"viewers": viewers, "seconds": seconds, "blocks": blocks, **found}


@dataclass(frozen=True)
class Block:
    """What one block has measured."""

    cpu_s: float
    """The gateway's processor time, seconds."""
    rss_bytes: int
    busy: float
    """Share of the machine's processor time that was busy, by all processes."""
    seconds: float
    delays_s: list[float]
    gaps: int
    repeats: int
    ended: int
    """Streams that the gateway has ended."""


def _measure(
    stack: BackgroundStack, viewers: int, seconds: float, blocks: int, modes: Mapping[str, str]
) -> dict[str, Any]:
    api = httpx.Client(base_url=stack.url, timeout=60.0)
    session = api.post("/v1/sessions", json={"prompt": "a red circle"}).raise_for_status().json()
    # A player over HTTP counts as playing at normal speed: it keeps the session generating.
    player = threading.Thread(target=_watch, args=(stack.url + session["links"]["video"],), daemon=True)
    player.start()
    found: dict[str, list[Block]] = {mode: [] for mode in modes}
    for number in range(blocks):
        for mode in modes if number % 2 == 0 else reversed(list(modes)):
            with _gateway(stack, modes[mode]) as (process, port):
                found[mode].append(_block(process, port, session["id"], viewers, seconds))
    return {
        "machine_busy": round(max(block.busy for made in found.values() for block in made), 3),
        **{mode: _figures(made, viewers) for mode, made in found.items()},
    }


def _figures(made: list[Block], viewers: int) -> dict[str, Any]:
    seconds = sum(block.seconds for block in made)
    delays_s = [delay for block in made for delay in block.delays_s]
    return {
        "cpu_share": round(sum(block.cpu_s for block in made) / seconds, 4),
        "cpu_per_viewer_us": round(sum(block.cpu_s for block in made) / seconds / viewers * 1e6, 1),
        "cpu_shares": [round(block.cpu_s / block.seconds, 4) for block in made],
        "rss_bytes": max(block.rss_bytes for block in made),
        "deliveries": len(delays_s),
        "delivery_s": {f"p{share}": percentile(delays_s, share / 100) for share in (50, 95, 99, 100)},
        "gaps": sum(block.gaps for block in made),
        "repeats": sum(block.repeats for block in made),
        "ended": sum(block.ended for block in made),
    }


def _block(process: psutil.Process, port: int, session: str, viewers: int, seconds: float) -> Block:
    command = [sys.executable, "-m", "turboserve.bench.fanout.viewers", f"ws://127.0.0.1:{port}", session]
    with subprocess.Popen(
        [*command, str(viewers), str(seconds)], stdout=subprocess.PIPE, text=True
    ) as clients:
        assert clients.stdout is not None
        if clients.stdout.readline().strip() != "counting":
            raise BenchError("the viewers have not connected")
        before, machine, began = _used(process), psutil.cpu_times(), time.monotonic()
        answer = clients.stdout.readline()
        spent, took, after = _used(process) - before, time.monotonic() - began, psutil.cpu_times()
        rss = process.memory_info().rss
    if not answer:
        raise BenchError("the viewers have ended early")
    seen = json.loads(answer)
    if not seen["delays_s"]:
        raise BenchError(f"no chunk was delivered, and {seen['ended']} streams have ended")
    counts = seen["gaps"], seen["repeats"], seen["ended"]
    return Block(spent, rss, _busy(machine, after), took, seen["delays_s"], *counts)


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _busy(before: Any, after: Any) -> float:
    spent: dict[str, float] = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    idle = spent["idle"] + spent.get("iowait", 0.0)
    return 1.0 - idle / max(sum(spent.values()), 1e-9)


@contextmanager
def _gateway(stack: BackgroundStack, module: str) -> Iterator[tuple[psutil.Process, int]]:
    """Run one more gateway of the stack. Yields its process and its port."""
    password = Layout(stack.data).secret("nats.gateway")
    nats = re.sub(r"//[^@]*@", f"//gateway:{password}@", stack.record.nats_url)
    port = any_free()
    environment = {
        **os.environ,
        "TURBOSERVE_NATS_URL": nats,
        "TURBOSERVE_GATEWAY_PORT": str(port),
        "TURBOSERVE_LOG_LEVEL": "WARNING",
        "TURBOSERVE_DEFAULT_MODEL": NAME,
    }
    with subprocess.Popen([sys.executable, "-m", module], env=environment) as process:
        try:
            _until_ready(port)
            yield psutil.Process(process.pid), port
        finally:
            process.terminate()


def _until_ready(port: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the gateway is not ready after {READY_S:g} s") from None
            time.sleep(0.2)


def _watch(url: str) -> None:
    # The gateway ends the stream with the stack.
    try:
        with httpx.stream("GET", url, timeout=None) as answer:
            for _ in answer.iter_raw():
                pass
    except httpx.HTTPError:
        return


def _environment() -> Mapping[str, str]:
    """Return the variables of a stack with a paced worker."""
    device = PacedDevice(forward_s={1: 0.02}, computes=False, encodes=False)
    worker = [sys.executable, "-m", "turboserve.bench.paced.worker", device.to_json()]
    return {
        "TURBOSERVE_POOL_WORKER_COMMAND": json.dumps(worker),
        "TURBOSERVE_MODEL": NAME,
        "TURBOSERVE_DEFAULT_MODEL": NAME,
        "TURBOSERVE_MEMORY_BYTES": str(64 << 20),
        "TURBOSERVE_LOG_LEVEL": "WARNING",
    }


def _descriptors() -> int:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(soft, hard)
