"""Sessions of several classes on unlike workers: the highest load of a pool by placement policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import BenchError
from turboserve.experiments.mixed.analytic import analytic_loads
from turboserve.experiments.mixed.composing import composition_figures
from turboserve.experiments.mixed.family import KINDS, MIXES, WORKERS_OF_KIND, coefficient_of_variation
from turboserve.experiments.mixed.figures import compared, gains, median_interval, medians, summary
from turboserve.experiments.mixed.snapshot import POLICIES, fluid_of, load_at_99
from turboserve.experiments.mixed.solver import solver_times
from turboserve.experiments.mixed.switching import MODES, TRACES, switching_run
from turboserve.experiments.progress import progress_bar
from turboserve.experiments.result_folder import PaperCell, ResultFolder
from turboserve.experiments.slack.cell_store import source_digest

SEEDS, QUICK_SEEDS = 5, 2
MATRICES, QUICK_MATRICES = 20, 3
FIRST_SEED = 100
"""Seeds below this were used while the policies were written."""
PLACED, QUICK_PLACED = 4, 1
PARTS = ("loads", "placed", "switching", "solver", "composition")
DEFINITIONS = {
    "capability": "Declared: every n_kj and L_kj(b) is drawn from the family in the documentation.",
    "load_at_99": "Most sessions with 99 % of all chunks in time. Median over the matrices. In fractions of "
    "sessions, with the exact shares of the mix, by the cores that decide shares.",
    "placed": "The same with whole sessions, drawn by the mix, that the placement cores place one by one. A "
    "chunk is in time if the chunks of all classes of its worker take at most a chunk's playing time.",
    "load_at_99_each_class": "Most sessions with 99 % of the chunks of each class in time. Median.",
    "gain": "Load of `ours` over another policy's with the same matrix and sessions: median, 95 % interval "
    "of the median (bootstrap over matrices), and the worst matrix.",
    "static": "Each worker serves one class; the best split for equal demand.",
    "class_blind": "Min-max by the number of sessions.",
    "oserve": "Quotas from OServe's flow network, by preflow-push.",
    "oserve_exact": "Quotas from the exact optimum of OServe's objective.",
    "of_any": "Load over the one that no policy exceeds with 99 % of all chunks in time: the late 1 % is "
    "of the class whose sessions take most of the pool. With 99 % of the chunks of each class in time, "
    "`ours` is what no policy exceeds.",
    "of_bound": "Load over that of the linear program with fractions of sessions and the exact mix.",
    "solver": "Processor time of one program for 256 workers and 6 classes, by the number of kinds.",
    "composition": "Cost of the decision above the least of all compositions (2 kinds, 2 models). Processor "
    "time of a decision with 4 kinds, 6 classes and at most 64 workers, its cost above the optimum, and the "
    "time in which HiGHS finds that to 0.01 % (`exact`). The least served share of a class with the "
    "composition that OServe's Algorithm 1 finds for the same workers.",
    "switching": "Mixes that change over time (T1: 80 minutes, S1, S4, S5; T2: 50 minutes, S2, S4, S3), one "
    "matrix for each seed, whole sessions, in virtual time. `none`: the composition of all workers that is "
    "best for the mean mix, never changed. `disk`, `peers`: the autoscaler's controller, with 50 s and 10 s "
    "from the order of a worker until it serves (declared). A first chunk takes from the session's arrival. "
    "`without_place`: most sessions of a draining worker without a place elsewhere, at the worst instant of "
    "all seeds. `worst` of a time or a cost is the least value of a seed.",
    "method": "The cores decide on snapshots of sessions; no chunk is played out.",
}


def run(
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds with three matrices each.")] = False,
    only: Annotated[str, typer.Option(help=f"Parts to run, separated by commas: {', '.join(PARTS)}.")] = "",
    seeds: Annotated[int, typer.Option(min=0, help="Number of seeds. 0: 5, or 2 with --quick.")] = 0,
    matrices: Annotated[
        int, typer.Option(min=0, help="Matrices of each seed. 0: 20, or 3 with --quick.")
    ] = 0,
    first_seed: Annotated[int, typer.Option(min=0, max=10**6, help="First seed.")] = FIRST_SEED,
    placed: Annotated[
        int,
        typer.Option(min=0, help="Matrices of each seed with whole sessions. 0: 4, or 1 with --quick."),
    ] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Number of processes; 0 for one per core.")] = 1,
    cells: Annotated[Path | None, typer.Option(help="Folder that keeps finished runs.")] = None,
) -> dict[str, Any]:
    """Compare placements of several classes over declared capability matrices.

    A seed draws its matrices and its sessions. All policies get the same ones. With `--cells`, a run that
    was cut off continues.
    """
    parts = [name.strip() for name in only.split(",") if name.strip()] or list(PARTS)
    if unknown := sorted(set(parts) - set(PARTS)):
        raise BenchError(f"--only: {unknown[0]!r} is not known; known: {', '.join(PARTS)}")
    numbers = range(first_seed, first_seed + (seeds or (QUICK_SEEDS if quick else SEEDS)))
    each = matrices or (QUICK_MATRICES if quick else MATRICES)
    result: dict[str, Any] = {
        "definitions": DEFINITIONS,
        "capability": "declared",
        "pool": {"kinds": KINDS, "workers": KINDS * WORKERS_OF_KIND},
        "cv": {mix: coefficient_of_variation(shares) for mix, shares in MIXES.items()},
        "source": source_digest(),
        "seeds": list(numbers),
        "matrices": each * len(numbers),
    }
    pairs = [(matrix_number(seed, place), seed) for seed in numbers for place in range(each)]
    few = placed or (QUICK_PLACED if quick else PLACED)
    some = [(matrix_number(seed, place), seed) for seed in numbers for place in range(few)]
    processes = jobs or os.cpu_count() or 1
    cells_in_all = len(pairs) + len(some) * len(MIXES) * (len(POLICIES) + 1) + len(numbers) * len(TRACES) * 3
    with progress_bar(cells_in_all) as done:
        folder = ResultFolder(cells)
        if "loads" in parts:
            result |= analytic_figures(folder, pairs, processes, done)
        if "placed" in parts:
            result["placed"] = placed_figures(folder, some, processes, done)
        if "switching" in parts:
            result["switching"] = switching_figures(folder, list(numbers), processes, done)
    if "solver" in parts:
        result["solver"] = solver_times(2 if quick else 10, first_seed)
    if "composition" in parts:
        cases = 10 if quick else 40
        result["composition"] = composition_figures(cases, cases, first_seed)
    return result


def matrix_number(seed: int, place: int) -> int:
    return seed * 10_000 + place


def analytic_figures(
    folder: ResultFolder, pairs: Sequence[tuple[int, int]], jobs: int, done: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures over all matrices, in fractions of sessions. `pairs`: matrix and seed."""
    cells = {number: PaperCell("mixed", f"matrix {number}", analytic_loads, (number,)) for number, _ in pairs}
    found = folder.run(cells.values(), jobs, done)
    values = {
        mix: {name: [found[cells[number]][mix][name] for number, _ in pairs] for name in POLICIES}
        for mix in MIXES
    }
    most = {mix: [found[cells[number]][mix]["any"][0] for number, _ in pairs] for mix in MIXES}
    of_any = {
        mix: {
            name: summary([one[0] / bound for one, bound in zip(by_name[name], most[mix], strict=True)])
            for name in ("ours", "oserve_exact")
        }
        for mix, by_name in values.items()
    }
    return {**_figures(values), "of_any": of_any}


def placed_figures(
    folder: ResultFolder, pairs: Sequence[tuple[int, int]], jobs: int, done: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures of whole sessions that the placement cores place. `pairs`: matrix and seed."""
    cells = {
        (mix, name, number): PaperCell(
            "mixed", f"{mix} {name} matrix {number}", load_at_99, (number, mix, name, seed)
        )
        for number, seed in pairs
        for mix in MIXES
        for name in POLICIES
    }
    bounds = {
        (mix, number): PaperCell("mixed", f"{mix} bound matrix {number}", fluid_of, (number, mix))
        for mix in MIXES
        for number, _ in pairs
    }
    found = folder.run([*cells.values(), *bounds.values()], jobs, done)
    values = {
        mix: {name: [found[cells[mix, name, number]] for number, _ in pairs] for name in POLICIES}
        for mix in MIXES
    }
    most = {mix: [found[bounds[mix, number]] for number, _ in pairs] for mix in MIXES}
    of_bound = {
        mix: summary([one[0] / bound for one, bound in zip(values[mix]["ours"], most[mix], strict=True)])
        for mix in MIXES
    }
    return {**_figures(values), "matrices": len(pairs), "of_bound": of_bound}


def switching_figures(
    folder: ResultFolder, seeds: Sequence[int], jobs: int, done: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures of mixes that change over time, by trace and mode."""
    cells = {
        (trace, mode, seed): PaperCell(
            "mixed",
            f"{trace} {mode} seed {seed}",
            switching_run,
            (matrix_number(seed, 0), trace, mode, seed),
        )
        for trace in TRACES
        for mode in MODES
        for seed in seeds
    }
    found = folder.run(cells.values(), jobs, done)
    return {
        trace: compared({mode: [found[cells[trace, mode, seed]] for seed in seeds] for mode in MODES})
        for trace in TRACES
    }


def _figures(values: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> dict[str, Any]:
    """Return medians, intervals and paired gains by mix.

    `values` has by mix and policy, for each matrix, the load with 99 % of all chunks in time, and that with
    99 % of the chunks of each class.
    """
    names = ("load_at_99", "load_at_99_ci95", "gain", "load_at_99_each_class", "gain_each_class")
    result: dict[str, Any] = {name: {} for name in names}
    for mix, by_policy in values.items():
        overall = {name: [float(one[0]) for one in loads] for name, loads in by_policy.items()}
        worst = {name: [float(one[1]) for one in loads] for name, loads in by_policy.items()}
        result["load_at_99"][mix] = medians(overall)
        result["load_at_99_ci95"][mix] = {name: median_interval(loads) for name, loads in overall.items()}
        result["gain"][mix] = gains(overall, "ours")
        result["load_at_99_each_class"][mix] = medians(worst)
        result["gain_each_class"][mix] = gains(worst, "ours")
    return result


def table(result: Mapping[str, Any]) -> Table:
    """Format the loads by mix, the gains, and the solver's times."""
    shown = Table("mix (CV)", *POLICIES, "over static: median, worst", "over oserve", box=box.SIMPLE)
    for part, of in (("", result), ("placed ", result.get("placed", {}))):
        for mix, by_policy in of.get("load_at_99", {}).items():
            gain = of["gain"][mix]
            shown.add_row(
                f"{part}{mix} ({result['cv'][mix]:.3f})",
                *(f"{by_policy[name]:.1f}" for name in POLICIES),
                *(f"{gain[name]['median']:.3f}, {gain[name]['worst']:.3f}" for name in ("static", "oserve")),
            )
    for trace, modes in result.get("switching", {}).items():
        for mode, figures in modes.items():
            shown.add_row(
                f"{trace}, {mode}",
                f"p99 {figures['p99_chunk_s']['median']:.2f} s",
                f"cost {figures['cost']['median']:.1f}",
                f"without a place {figures['without_place']}",
            )
    for kinds, times in result.get("solver", {}).items():
        shown.add_row(
            f"program, {kinds} kinds",
            f"p50 {times['p50_s'] * 1e3:.2f} ms",
            f"p99 {times['p99_s'] * 1e3:.2f} ms",
        )
    return shown
