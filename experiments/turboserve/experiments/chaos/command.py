"""Random faults on a real stack while sessions play: which invariants hold, and how fast it recovers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turboserve.bench.report import BenchError
from turboserve.cli.stack.background import StackStartError
from turboserve.experiments.chaos.invariants import INVARIANTS
from turboserve.experiments.chaos.mechanisms import MechanismSet, settings_of
from turboserve.experiments.chaos.plan import FREEZES, FaultGroup, decode_worker_names, plan
from turboserve.experiments.chaos.run import run_scenario
from turboserve.experiments.chaos.small_disk import SmallDiskError
from turboserve.experiments.chaos.surroundings import left_out, prepared


async def run(
    minutes: Annotated[float, typer.Option(min=0.25, help="Duration of the faults, in minutes.")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the plan of faults.")] = 0,
    workers: Annotated[int, typer.Option(min=2, max=16, help="Number of workers.")] = 2,
    schedulers: Annotated[int, typer.Option(min=1, max=4, help="Number of schedulers.")] = 2,
    sessions: Annotated[int, typer.Option(min=1, max=32, help="Number of sessions.")] = 3,
    decode_workers: Annotated[
        int,
        typer.Option(
            min=0, max=8, help="Number of decode workers, which are hit as well. 0: workers decode."
        ),
    ] = 0,
    gap: Annotated[float, typer.Option(min=1.0, help="Mean time between two faults, in seconds.")] = 8.0,
    fault: Annotated[
        list[FaultGroup] | None,
        typer.Option(help="Group of faults; may be repeated. The default is process.", show_default=False),
    ] = None,
    mechanisms: Annotated[
        MechanismSet,
        typer.Option(
            help="Mechanisms of the stack. With all, those that are off as shipped are on, and clients drop "
            "their buffers and change their limits."
        ),
    ] = MechanismSet.SHIPPED,
    redundancy: Annotated[
        bool,
        typer.Option(
            "--redundancy",
            help="Run two gateways, schedulers, state stores and autoscalers, three NATS servers, at least "
            "three workers, with short times of failure detection.",
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Keep the stack's data and logs in this folder. By default they are deleted."),
    ] = None,
) -> dict[str, Any]:
    """Check the design's invariants on a real stack with random faults, while sessions play.

    Services and workers get SIGKILL, SIGSTOP and SIGCONT. NATS, Redis and Postgres restart. Real clients
    change prompts, pause, resume and migrate. With --decode-workers, the workers denoise and others decode:
    the same faults hit these. --fault adds a full disk, a gateway without descriptors, steps
    of the clock, a frozen broker, slow or silent connections, slow disks, or a service that is behind by
    minutes. With --redundancy, it also freezes one or two processes at once, and
    measures the stalls of clients with a buffer of 3 s.
    """
    seconds = minutes * 60.0
    wanted = list(dict.fromkeys(fault or [FaultGroup.PROCESS]))
    omitted = left_out(wanted)
    groups = [group for group in wanted if group not in omitted]
    if not groups:
        raise BenchError("; ".join(f"{group.value}: {reason}" for group, reason in omitted.items()))
    if redundancy:
        workers, schedulers = max(workers, 3), max(schedulers, 2)
    elif set(groups) & set(FREEZES):
        raise typer.BadParameter("one_frozen and two_frozen need --redundancy", param_hint="--fault")
    limits = mechanisms is MechanismSet.ALL
    decoders = decode_worker_names(decode_workers)
    planned = plan(
        seed, seconds, sessions, schedulers, gap, groups, decoders, limits=limits, redundancy=redundancy
    )
    with tempfile.TemporaryDirectory(prefix="turboserve-chaos-") as folder:
        place = (data or Path(folder) / "data").absolute()
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with prepared(groups, Path(folder), place, seed, redundancy=redundancy) as surroundings:
                surroundings.environment |= settings_of(mechanisms, Path(folder))
                found = await run_scenario(
                    planned,
                    seconds,
                    surroundings,
                    workers,
                    schedulers,
                    sessions,
                    decoders,
                    redundancy=redundancy,
                )
        except SmallDiskError as error:
            raise BenchError(str(error)) from None
        except StackStartError as error:
            raise BenchError(f"the stack did not start: {error}") from None
        except TimeoutError as error:
            raise BenchError(f"no video before the first fault: {error}") from None
    found.left_out = {group.value: reason for group, reason in omitted.items()}
    return found.report()


def table(result: Mapping[str, Any]) -> RenderableType:
    """Format the invariants, the recovery times and the faults."""
    held = Table("invariant", "violations", "meaning", box=box.SIMPLE)
    for name, count in result["violations"].items():
        held.add_row(name, str(count), INVARIANTS[name])
    figures = Table(show_header=False, box=None, pad_edge=False)
    for name in ("recovery_s", "playing_again_s", "worker_recovery_s", "takeover_s", "ready_again_s"):
        spread = result[name]
        if spread["max"] is not None:
            figures.add_row(name, f"p50 {spread['p50']:.2f}, max {spread['max']:.2f}")
    for name, spread in result["frozen_stall_s"].items():
        if spread["max"] is not None:
            figures.add_row(f"stall_s, {name}", f"p50 {spread['p50']:.2f}, max {spread['max']:.2f}")
    if (decoded := result["decoded_apart"]) is not None:
        figures.add_row("decoded_apart", str(decoded))
    for name in ("settle_s", "chunks", "chunks_lost", "chunks_repeated", "owner_changes", "reconnects"):
        value = result[name]
        figures.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    for name in ("faults", "deeds"):
        figures.add_row(name, ", ".join(f"{key} {count}" for key, count in result[name].items()))
    lines = [Text(message, style="red") for message in result["messages"]]
    lines += [Text(f"omitted: {name}: {reason}") for name, reason in result["left_out"].items()]
    return Group(held, figures, *lines)
