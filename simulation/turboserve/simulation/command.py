"""The services' own processes on virtual time, with faults or in calm mode: the invariants of the design."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from turboserve.plugins import NotInstalledError
from turboserve.scheduler.placement import PLACEMENTS, REBALANCERS
from turboserve.simulation.calm import calm_table, run_calm
from turboserve.simulation.fault_table import fault_table
from turboserve.simulation.huge_pages import use_huge_pages
from turboserve.simulation.mechanisms import Mechanisms
from turboserve.simulation.names import INVARIANTS
from turboserve.simulation.scenario import (
    SETTLE_S,
    ScenarioOutcome,
    percentiles,
    run_scenario,
    scale_of,
    with_classes,
    with_offers,
    with_roles,
)
from turboserve.simulation.settings import (
    GATHER,
    PLACEMENT,
    REBALANCER,
    RESCUE_HORIZON_S,
)
from turboserve.worker.engine.fidelity_policy import FIDELITY_POLICIES
from turboserve.worker.engine.gather import GATHER_POLICIES
from turboserve.worker.settings import BEST

TWICE_EVERY = 20
"""Every seed divisible by this number runs twice; the two traces must be equal."""
SHOWN = 20
"""Maximum number of failing seeds in the result."""


class SimulationMode(StrEnum):
    """What is simulated."""

    FAULTS = "faults"
    """Many seeds, each with its own selection of faults."""
    CALM = "calm"
    """One deployment of any size without faults."""


def run(
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, run one after the other.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Run this seed only.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print every line of the trace.")] = False,
    seconds: Annotated[float, typer.Option(min=1.0, help="Virtual seconds with faults.")] = 25.0,
    mode: Annotated[
        SimulationMode, typer.Option(help="Many seeds with faults, or one calm deployment.")
    ] = SimulationMode.FAULTS,
    workers: Annotated[int, typer.Option(min=1, help="Calm: number of workers.")] = 8,
    sessions: Annotated[int, typer.Option(min=1, help="Calm: number of concurrent sessions.")] = 50,
    slots: Annotated[int, typer.Option(min=1, help="Calm: number of slots per worker.")] = 8,
    host_sessions: Annotated[
        int,
        typer.Option(
            min=0,
            help="Calm: number of these slots beyond the worker's slabs. Sessions take turns in the slabs.",
        ),
    ] = 0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Calm: virtual minutes.")] = 5.0,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Calm: CSV file of sessions with the columns arrives_s,plays_s. Replaces --sessions."
        ),
    ] = None,
    every_forward: Annotated[
        bool,
        typer.Option(
            "--every-forward", help="Calm: one engine step per forward. The default is one per chunk."
        ),
    ] = False,
    placement: Annotated[str, typer.Option(help="The schedulers' placement policy.")] = PLACEMENT,
    gather: Annotated[
        str | None, typer.Option(help="The workers' gather policy. Replaces what a seed draws.")
    ] = None,
    rebalancer: Annotated[str, typer.Option(help="The schedulers' rebalancer.")] = REBALANCER,
    rescue_horizon: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=60,
            help="Seconds in which the rebalancer saves late chunks. 0: none. Replaces what a seed draws.",
        ),
    ] = None,
    fidelity: Annotated[
        str | None,
        typer.Option(
            help="With faults: the workers' policy of configurations. Replaces what a seed draws. Under any "
            "but `best`, devices are too slow for the best configuration."
        ),
    ] = None,
    mechanisms: Annotated[
        Mechanisms,
        typer.Option(
            help="With faults: in which seeds workers lower quality, gather by tiers and have more sessions "
            "than slabs or lend each other their devices, schedulers rescue late chunks, the pool absorbs, "
            "and admission forecasts slots. `loans`: in all, workers lend, and nothing else is used."
        ),
    ] = Mechanisms.DRAWN,
    models: Annotated[
        int,
        typer.Option(
            min=1,
            max=2,
            help="With faults: classes of sessions that each worker serves. With 2, each seed draws their "
            "order and numbers of sessions, and workers outside the pool. Workers then lower no quality.",
        ),
    ] = 1,
    offers: Annotated[
        bool,
        typer.Option(
            "--offers",
            help="With faults: a pool with several offers. Each worker serves one of two models, and each "
            "seed draws kinds of workers, their limits and prices. Workers lower no quality.",
        ),
    ] = False,
    roles: Annotated[
        bool,
        typer.Option("--roles", help="With faults: workers that only denoise, decode workers, text workers."),
    ] = False,
    failover: Annotated[
        bool,
        typer.Option(
            "--failover",
            help="With faults: the short times of a stack with redundancy, and two state stores.",
        ),
    ] = False,
) -> dict[str, Any]:
    """Run the services' own processes on virtual time, against servers in memory.

    With faults, processes crash at every step and the network is bad; the design's invariants are checked
    after each event.
    """
    try:
        PLACEMENTS.check(placement)
        GATHER_POLICIES.check(gather or GATHER)
        REBALANCERS.check(rebalancer)
        FIDELITY_POLICIES.check(fidelity or BEST)
    except NotInstalledError as error:
        raise typer.BadParameter(str(error)) from error
    if (models > 1 or offers) and (mode is SimulationMode.CALM or fidelity not in (None, BEST)):
        option = "--offers" if offers else "--models"
        raise typer.BadParameter(f"{option}: calm mode and --fidelity need workers of one model")
    if roles and (models > 1 or mode is SimulationMode.CALM):
        raise typer.BadParameter("--roles: calm mode and --models need workers of both roles")
    if host_sessions >= slots:
        raise typer.BadParameter(f"--host-sessions: {host_sessions} must be less than --slots, {slots}")
    if mode is SimulationMode.CALM:
        use_huge_pages()
        file = None if arrivals is None else Path(arrivals)
        result = run_calm(
            seed or first,
            workers,
            slots,
            sessions,
            60.0 * minutes,
            file,
            keep_lines=trace,
            every_forward=every_forward,
            placement=placement,
            gather=gather or GATHER,
            rebalancer=rebalancer,
            rescue_horizon_s=RESCUE_HORIZON_S if rescue_horizon is None else rescue_horizon,
            host_sessions=host_sessions,
        )
        # The process ends next. Its end would search millions of objects for garbage.
        gc.freeze()
        return result
    replaced = {"gather": gather, "rescue_horizon_s": rescue_horizon, "fidelity": fidelity}
    chosen = range(first, first + seeds) if seed is None else range(seed, seed + 1)
    began, began_cpu = time.monotonic(), time.process_time()
    outcomes, unequal = list[ScenarioOutcome](), list[int]()
    for each in chosen:
        scale = replace(
            scale_of(each, mechanisms, may_lend=models == 1 and not (offers or roles)),
            placement=placement,
            rebalancer=rebalancer,
            **{name: value for name, value in replaced.items() if value is not None},  # type: ignore[arg-type]
        )
        if offers:
            scale = with_offers(scale, each)
        elif models > 1:
            scale = with_classes(scale, each)
        if roles:
            scale = with_roles(scale, each)
        if failover:
            scale = scale.with_failover()
        outcome = run_scenario(each, seconds=seconds, scale=scale, keep_lines=trace)
        if (
            each % TWICE_EVERY == 0
            and run_scenario(each, seconds=seconds, scale=scale).digest != outcome.digest
        ):
            unequal.append(each)
        if trace:
            print("\n".join(outcome.lines))
        outcomes.append(outcome)
        if each % TWICE_EVERY == 0:
            # Each run freezes the garbage of the runs before it, so no automatic collection finds that.
            gc.collect()
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    options = (
        "".join(
            f" {option} {chosen}"
            for option, chosen, shipped in (
                ("--placement", placement, PLACEMENT),
                ("--gather", gather, None),
                ("--rebalancer", rebalancer, REBALANCER),
                ("--rescue-horizon", rescue_horizon, None),
                ("--fidelity", fidelity, None),
                ("--models", models, 1),
                ("--mechanisms", mechanisms.value, Mechanisms.DRAWN.value),
            )
            if chosen != shipped
        )
        + " --offers" * offers
        + " --roles" * roles
        + " --failover" * failover
    )
    return summary(outcomes, unequal, seconds, wall_s, cpu_s, options)


def summary(
    outcomes: list[ScenarioOutcome],
    unequal: list[int],
    seconds: float,
    wall_s: float,
    cpu_s: float,
    options: str = "",
) -> dict[str, Any]:
    """Sum up the outcomes of all seeds.

    `unequal`: seeds whose second run gave another trace. `options`: further ones of a replay's command.
    """
    violations = Counter(dict.fromkeys(INVARIANTS, 0))
    for outcome in outcomes:
        violations.update(outcome.violations)
    violations["deterministic"] += len(unequal)
    twice = [outcome for outcome in outcomes if outcome.seed % TWICE_EVERY == 0]
    events = sum(outcome.events for outcome in outcomes)
    events_with_repeats = events + sum(outcome.events for outcome in twice)
    settled = [outcome.settled_s for outcome in outcomes if outcome.settled_s is not None]
    return {
        "mode": SimulationMode.FAULTS.value,
        "seeds": len(outcomes),
        "violations": dict(violations),
        "failing": _failing(outcomes, unequal, f"--seconds {seconds:g}{options}"),
        "failing_seeds": len({o.seed for o in outcomes if o.violations} | set(unequal)),
        "digest": outcomes[0].digest if len(outcomes) == 1 else None,
        "played_twice": len(twice),
        "events": events,
        "counts": dict(sum((Counter(outcome.counts) for outcome in outcomes), Counter())),
        "settle_s": {
            **percentiles(settled),
            "max": max(settled, default=None),
            "bound": SETTLE_S,
        },
        "seeds_per_s": len(outcomes) / wall_s,
        "events_per_s": events / wall_s,
        "events_per_cpu_s": events_with_repeats / max(cpu_s, 1e-9),
        "cpu_s": cpu_s,
        "seeds_per_cpu_s": len(outcomes) / max(cpu_s, 1e-9),
    }


def _failing(outcomes: Iterable[ScenarioOutcome], unequal: list[int], options: str) -> list[dict[str, Any]]:
    found = [
        {
            "seed": outcome.seed,
            "replay": f"turboserve bench simulate --seed {outcome.seed} {options} --trace",
            "violations": outcome.violations | ({"deterministic": 1} if outcome.seed in unequal else {}),
            "messages": list(outcome.messages),
        }
        for outcome in outcomes
        if outcome.violations or outcome.seed in unequal
    ]
    return found[:SHOWN]


def table(result: Mapping[str, Any]) -> RenderableType:
    """Format the violations by invariant, then the commands that replay the failing seeds."""
    return calm_table(result) if result["mode"] == SimulationMode.CALM.value else fault_table(result)
