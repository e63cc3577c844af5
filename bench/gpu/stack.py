"""The whole stack with a large model on one GPU: viewers of one worker, migrations between two, and a home
whose chunks a decode worker decodes.

    python bench/gpu/stack.py --out stack.json
    python bench/gpu/stack.py --out stack.json --workers 2 --backends gloo shm

Needs the stack's dependencies and servers. The model has random weights (`random-longlive-1-3b`).
`--model random-tiny` tries the script without a GPU. With `--backends`, each of these transfer backends has
two workers of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from notes import Notes

from turboserve.bench.engine.random_models import NAME
from turboserve.bench.stream import Target, measure
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack
from turboserve.cli.stack.decode_pool import DECODE_WORKER

DECODED = {
    "chunks": "turboserve_worker_decode_duration_seconds_count",
    "seconds": "turboserve_worker_decode_duration_seconds_sum",
    "rebuilt": "turboserve_worker_decode_rebuilt_total",
}
BACKENDS = ("gloo", "shm", "nixl")
POOLS = {
    "1": ("--workers", "1"),
    "2": ("--workers", "2"),
    "decode": ("--workers", "1", "--decode-workers", "1"),
}
"""Options of `turboserve up` by the name of the workers."""
FETCHED = re.compile(r"state fetched .*backend=(\S+) rounds=(\d+) bytes=(\d+) seconds=(\S+)")
Work = Callable[[], Awaitable[dict[str, Any]]]
WAIT_S = 60.0
MIGRATED_S = 40.0
"""Longest wait for one migration, seconds."""
BETWEEN_S = 4.0
"""Pause before each migration, seconds."""


def environment(model: str, memory_bytes: int, sessions: int) -> dict[str, str]:
    """Return the settings of a stack whose workers share the GPU."""
    return {
        "TURBOSERVE_MODEL": model,
        "TURBOSERVE_DEFAULT_MODEL": model,
        "TURBOSERVE_MEMORY_BYTES": str(memory_bytes),
        "TURBOSERVE_HOST_MEMORY_BYTES": str(8 << 30 if model == NAME else 1 << 28),
        "TURBOSERVE_WORKER_MAX_SESSIONS": str(sessions),
    }


async def ready_workers(api: httpx.AsyncClient, count: int) -> set[str]:
    """Wait until `count` workers are ready. Returns their ids. Raises TimeoutError."""
    deadline_s = time.monotonic() + 2 * WAIT_S
    while time.monotonic() < deadline_s:
        workers = (await api.get("/v1/workers")).json()["workers"]
        ready = {worker["id"] for worker in workers if worker["phase"] == "ready"}
        if len(ready) >= count:
            return ready
        await asyncio.sleep(0.2)
    raise TimeoutError(f"fewer than {count} workers are ready")


async def streams(stack: BackgroundStack, sessions: int, seconds: float) -> dict[str, Any]:
    """Watch `sessions` sessions, as `turboserve bench stream` does."""
    return (await measure(Target.find(stack.data), sessions, seconds)).report()


async def decoded_apart(stack: BackgroundStack, seconds: float) -> dict[str, Any]:
    """Watch a session whose chunks the decode worker decodes. Counts are of the decode worker's metrics."""
    found = await streams(stack, 1, seconds)
    async with httpx.AsyncClient(timeout=WAIT_S) as api:
        port = stack.record.processes[DECODE_WORKER]["port"]
        lines = (await api.get(f"http://127.0.0.1:{port}/metrics")).text.splitlines()
    for name, series in DECODED.items():
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series)]
        found[f"decode_worker_{name}"] = sum(values)
    return found


async def migrations(stack: BackgroundStack, count: int) -> dict[str, Any]:
    """Watch a session that migrates to and fro between two workers. Seconds are of the wall clock."""
    found: list[dict[str, Any]] = []
    async with httpx.AsyncClient(base_url=stack.url, timeout=WAIT_S) as api:
        workers = await ready_workers(api, 2)
        viewer = await Viewer.create(api, "a red circle moving left", seed=5)
        async with viewer.watching():
            await viewer.more_chunks(6, WAIT_S)
            for _ in range(count):
                await asyncio.sleep(BETWEEN_S)
                try:
                    found.append(await _migrate(api, viewer, workers))
                except TimeoutError as error:
                    found.append({"failed": str(error)})
                    break
            player, chunks = viewer.player, list(viewer.chunks)
            player.tick(time.monotonic())
        decisions = (await api.get(f"/v1/sessions/{viewer.session}/decisions")).json()["decisions"]
        await viewer.delete()
    done = [one["numbers"] for one in decisions if one["kind"] == "migrated"]
    stayed = [one["reason"] for one in decisions if one["kind"] == "stay"]
    intervals = [b - a for a, b in zip(player.arrivals_s, player.arrivals_s[1:], strict=False)]
    return {
        "migrations": found,
        "decisions": done,
        "stayed": stayed,
        "fetched": [
            {"backend": backend, "rounds": int(rounds), "bytes": int(size), "seconds": float(seconds)}
            for backend, rounds, size, seconds in FETCHED.findall(stack.log.read_text(errors="replace"))
        ],
        "stalls": player.stalls,
        "stall_s": player.stall_s,
        "chunks": len(chunks),
        "lost": player.lost,
        "repeated": player.repeated,
        "longest_interval_s": max(intervals),
        "intervals_s": [round(interval, 3) for interval in intervals],
    }


async def _migrate(api: httpx.AsyncClient, viewer: Viewer, workers: set[str]) -> dict[str, Any]:
    row = (await api.get(f"/v1/sessions/{viewer.session}")).json()
    [target] = workers - {row["worker"]}
    began_s, began, told = time.monotonic(), len(viewer.chunks), len(viewer.events)
    answer = await api.post(f"/v1/sessions/{viewer.session}/migrate", json={"worker": target})
    if answer.status_code != 202:
        return {"refused": answer.json()}
    await viewer.until(
        lambda: any(event["type"] == "session.migrated" for event in viewer.events[told:]),
        MIGRATED_S,
        "event session.migrated",
    )
    migrated_s = time.monotonic() - began_s
    await viewer.until(
        lambda: sum(chunk.worker == target for chunk in viewer.chunks[began:]) >= 2, WAIT_S, "two chunks"
    )
    others = viewer.chunks[began:]
    first = next(chunk for chunk in others if chunk.worker == target)
    last = [chunk for chunk in viewer.chunks if chunk.index < first.index][-1]
    return {
        "request_to_migrated_s": migrated_s,
        "last_to_first_chunk_s": first.published_at - last.published_at,
    }


def main() -> None:
    """Measure one worker, then two, then one with a decode worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; logs are beside it")
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--memory-gb", type=float, default=34.0, help="device memory of each worker")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--migrations", type=int, default=4)
    parser.add_argument(
        "--workers",
        nargs="+",
        choices=tuple(POOLS),
        default=tuple(POOLS),
        help="1: viewers of one worker; 2: migrations between two; decode: a home and a decode worker",
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=(),
        help="transfer backends of two workers, each measured alone; otherwise the workers choose",
    )
    parser.add_argument("--limit-s", type=float, default=200.0, help="begin nothing after this many seconds")
    arguments = parser.parse_args()
    notes = Notes(arguments.out, time.monotonic() + arguments.limit_s)
    settings = environment(arguments.model, round(arguments.memory_gb * 1e9), 2)
    folder = Path(tempfile.mkdtemp())

    for workers, backend in stacks(arguments):
        began, name = time.monotonic(), "_".join(filter(None, (workers, backend)))
        chosen = {"TURBOSERVE_TRANSFER_BACKENDS": json.dumps([backend])} if backend else {}
        stack = BackgroundStack(folder / f"data{name}", *POOLS[workers], environment=settings | chosen)
        try:
            stack.start()
            notes.found[f"start_s_{name}"] = time.monotonic() - began
            for part, work in parts(stack, workers, arguments):
                into = "_".join(filter(None, (part, backend)))
                notes.take(notes.found, into, partial(_limited, work, arguments.seconds + 2 * WAIT_S))
        except Exception as error:
            notes.found[f"failed_{name}"] = repr(error)[-4000:]
        finally:
            if stack.log.exists():
                arguments.out.with_name(f"stack_{name}.log").write_bytes(stack.log.read_bytes())
            notes.save()
            stack.stop()
    print(json.dumps(notes.found, indent=1))


def stacks(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the workers and the transfer backend of each stack; empty: the workers choose."""
    for workers in arguments.workers:
        for backend in arguments.backends if workers == "2" and arguments.backends else ("",):
            yield workers, backend


def parts(stack: BackgroundStack, workers: str, arguments: argparse.Namespace) -> list[tuple[str, Work]]:
    """Return what to measure with these workers, by name."""
    if workers == "2":
        return [("migrations", partial(migrations, stack, arguments.migrations))]
    if workers == "decode":
        return [("decoded_apart", partial(decoded_apart, stack, arguments.seconds))]
    return [(f"streams_{count}", partial(streams, stack, count, arguments.seconds)) for count in (1, 2)]


def _limited(work: Work, limit_s: float) -> dict[str, Any]:
    async def limited() -> dict[str, Any]:
        return await asyncio.wait_for(work(), limit_s)

    return asyncio.run(limited())


if __name__ == "__main__":
    main()
