"""Starts of real worker processes with padded weights: from a peer, from a warm and from a cold disk."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from turboserve.bench.migration.stack import ServerProcesses, end_process, server_processes
from turboserve.bench.report import BenchError
from turboserve.bench.weights.padded import NAME, load, write_padding
from turboserve.worker.replicas.models import ModelOptions

WAYS = ("peers", "warm", "cold")
START_LIMIT_S = 180.0
PARTS = ("import_s", "weights_s", "warm_up_s")
READ_BYTES = 8 << 20


def starts(size: int, rounds: int, backend: str) -> dict[str, Any]:
    """Start workers in turn in each way, `rounds` times, beside one worker that serves the model.

    Returns medians of the parts of a start by way, seconds, and all rounds. `size`: bytes of the padding.
    """
    with tempfile.TemporaryDirectory(prefix="turboserve-bench-") as folder:
        file = Path(folder) / "padding.safetensors"
        write_padding(file, size)
        digest = load(ModelOptions(torch.device("cpu"), torch.float32, checkpoint=file)).weights
        with server_processes(Path(folder) / "data") as servers, ExitStack() as stack:
            environment = {
                "TURBOSERVE_MODEL": NAME,
                "TURBOSERVE_CHECKPOINT": str(file),
                "TURBOSERVE_WEIGHTS_DIGEST": digest,
                "TURBOSERVE_TRANSFER_BACKENDS": f'["{backend}"]',
                "TURBOSERVE_WORKER_MAX_SESSIONS": "1",
                "TURBOSERVE_LOG_FORMAT": "json",
            }
            # It finds no peer, and reads its files.
            holder = {**environment, "TURBOSERVE_WEIGHTS": "peers"}
            started, _ = _start(servers, "wrk_holder", holder)
            stack.callback(end_process, started)
            found: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for number in range(rounds):
                # Another order in each round.
                for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                    found[way].append(_one(servers, f"wrk_{way}_{number}", way, file, environment))
    return {
        way: {
            **{part: statistics.median(one[part] for one in ones) for part in (*PARTS, "total_s")},
            "read_bytes": statistics.median(one["read_bytes"] for one in ones),
            "rounds": ones,
        }
        for way, ones in found.items()
    }


def _one(
    servers: ServerProcesses, worker: str, way: str, file: Path, environment: dict[str, str]
) -> dict[str, Any]:
    (drop_from_cache if way == "cold" else read_into_cache)(file)
    source = "peers" if way == "peers" else "disk"
    process, line = _start(servers, worker, {**environment, "TURBOSERVE_WEIGHTS": source})
    end_process(process)
    if line["weights_from"] != source:
        said = (servers.layout.logs / f"{worker}.log").read_text(errors="replace")[:2_000]
        raise BenchError(f"{worker}: its weights came from {line['weights_from']}:\n{said}")
    return line


def _start(servers: ServerProcesses, worker: str, environment: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """Start a worker and wait until it serves. Returns the process and what it says about its start."""
    log = servers.layout.logs / f"{worker}.log"
    began = time.monotonic()
    process = servers.start("turboserve.worker", {**servers.worker_environment(worker), **environment}, log)
    while time.monotonic() - began < START_LIMIT_S and process.poll() is None:
        line = joins(log.read_text(errors="replace"))
        if line is not None:
            parts = {part: float(line[part]) for part in PARTS}
            read = psutil.Process(process.pid).io_counters().read_bytes
            total = time.monotonic() - began
            return process, {
                **parts,
                "total_s": total,
                "weights_from": line["weights_from"],
                "read_bytes": read,
            }
        time.sleep(0.02)
    end_process(process)
    raise BenchError(f"{worker} did not serve:\n{log.read_text(errors='replace')[-2_000:]}")


def joins(text: str) -> dict[str, Any] | None:
    """The line of a worker's log in which it joins. None: it is not there, or not written to its end yet."""
    for line in text.splitlines(keepends=True):
        if "worker joins" in line and line.endswith("\n"):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def drop_from_cache(file: Path) -> None:
    """Remove a file from the machine's page cache. A virtual machine's disk may have another cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_into_cache(file: Path) -> None:
    """Bring a file into the page cache."""
    with file.open("rb") as opened:
        while opened.read(READ_BYTES):
            pass
