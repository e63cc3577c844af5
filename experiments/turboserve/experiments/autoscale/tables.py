"""Builds a table with its provenance from trace files, for `turboserve profile autoscaler`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from turboserve.contracts.autoscale import ProfileTable, Provenance
from turboserve.contracts.errors import InvalidInputError
from turboserve.experiments.autoscale.appendix import BURSTS, CALM, calm, segment
from turboserve.experiments.autoscale.keeping import as_a_whole, keep_target
from turboserve.experiments.autoscale.plant import Plant, linear, policy_for
from turboserve.experiments.autoscale.profiling import build_table, split_trace, whole
from turboserve.experiments.autoscale.trace import WorkloadTrace, read

FAMILY_SEEDS = 3


def profile_traces(
    files: Sequence[Path],
    levels: int,
    segment_s: float,
    capacity: int,
    most: int,
    start_up_s: float,
    lone_chunk_s: float,
    latency_target_s: float,
    keeps_target: bool,
    progress: Callable[[str], None],
) -> ProfileTable:
    """Build the table for workers of `capacity` sessions with L(n) = n × `lone_chunk_s`.

    The table is profiled on the trace files or, without any, on the family of Appendix A. Its provenance
    records how late it is on them as a whole. With `keeps_target`, the table is lowered until no session is
    late. Raises InvalidInputError that names the file's row or the option.
    """
    if capacity * lone_chunk_s > latency_target_s:
        detail = f"chunks of a full worker take {capacity * lone_chunk_s:g} s: no table can meet the target"
        raise InvalidInputError(detail, field="latency-target", limit=latency_target_s)
    plant = Plant(
        capacity=capacity,
        most=most,
        start_up_s=start_up_s,
        target_s=latency_target_s,
        latency_s=linear(capacity, lone_chunk_s),
    )
    policy = policy_for(plant)
    if files:
        traces = [read(path) for path in files]
        segments = [piece for trace in traces for piece in split_trace(trace, segment_s, policy)]
        source = ", ".join(f"{trace.name} {trace.digest}" for trace in traces)
    else:
        traces = family()
        segments = [whole(trace, policy) for trace in traces]
        source = "the family of TurboServe's Appendix A, bursts of "
        source += f"{BURSTS[0]} to {BURSTS[-1]} sessions, and calm traffic of {CALM[0]} to {CALM[-1]}"
    provenance = Provenance(
        source=source,
        command=_command(
            files, levels, segment_s, capacity, most, start_up_s, lone_chunk_s, latency_target_s, keeps_target
        ),
        made_at=time.time(),
    )
    table = build_table(segments, levels, plant, policy, provenance, progress=progress)
    if keeps_target:
        return keep_target(table, traces, plant, policy, progress=progress)
    return as_a_whole(table, traces, plant, policy)


def family() -> list[WorkloadTrace]:
    """Return the traces that are profiled if no files are given."""
    bursts = [segment(burst, seed) for burst in BURSTS for seed in range(FAMILY_SEEDS)]
    return bursts + [calm(sessions, seed) for sessions in CALM for seed in range(FAMILY_SEEDS)]


def _command(
    files: Sequence[Path], levels: int, segment_s: float, capacity: int, most: int, start_up_s: float,
    lone_chunk_s: float, latency_target_s: float, keeps_target: bool,
) -> str:  # fmt: skip
    """Return the command that reproduces the table, with file names without folders."""
    options = [f"--trace {shlex.quote(path.name)}" for path in files]
    options += [f"--levels {levels}", f"--segment {segment_s:g}", f"--capacity {capacity}", f"--most {most}"]
    options += [f"--start-up {start_up_s:g}", f"--lone-chunk {lone_chunk_s:g}"]
    options += [f"--latency-target {latency_target_s:g}", *["--keep-target"] * keeps_target]
    return " ".join(["turboserve profile autoscaler", *options])
