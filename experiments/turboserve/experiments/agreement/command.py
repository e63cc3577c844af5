"""The simulator against the real stack: the same trace on both sides, and the real decisions again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import BenchError
from turboserve.experiments.agreement import prediction, real, simulated, summary, toyworld
from turboserve.experiments.agreement.declared import (
    BUSIEST,
    CAPACITY,
    FORWARD_S,
    POLICIES,
    SETTINGS,
    STATE_BYTES,
    Constants,
    Declared,
    Size,
)
from turboserve.experiments.agreement.fit import fitted
from turboserve.experiments.agreement.prediction import REPEATS
from turboserve.experiments.progress import progress_bar
from turboserve.experiments.result_folder import PaperCell, ResultFolder
from turboserve.experiments.slack.cell_store import source_digest
from turboserve.plugins import NotInstalledError
from turboserve.scheduler.placement import PLACEMENTS

FIT_DRAW = 0
DRAWS = 2
QUICK = Size(workers=2, minutes=0.5, sessions=8)
NAME = "agreement"


def run(
    workers: Annotated[int, typer.Option(min=1, max=32, help="Maximum number of workers.")] = 8,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=7.5, help="Length of the beginning of trace M that is played.")
    ] = 7.5,
    sessions: Annotated[int, typer.Option(min=1, help="Maximum number of active sessions.")] = 48,
    draws: Annotated[
        int, typer.Option(min=1, help="Number of draws that are predicted, beside the one that fits.")
    ] = DRAWS,
    policies: Annotated[
        str, typer.Option(help="Placement policies, separated by commas. The first one's run fits.")
    ] = ",".join(POLICIES),
    quick: Annotated[
        bool, typer.Option("--quick", help="Two workers, half a minute, one draw, one policy.")
    ] = False,
    toys: Annotated[bool, typer.Option("--toyworld/--no-toyworld", help="Whether toyworld runs.")] = True,
    cells: Annotated[
        Path | None, typer.Option(help="Folder that keeps runs that count, so that a run can continue.")
    ] = None,
) -> dict[str, Any]:
    """Play trace M on a real stack with paced workers, and in the simulator.

    Constants of the stack are fitted on one draw, and other draws are predicted. A run is void if the machine
    was too busy. The recorded events of the real run are fed to new cores.
    """
    names = [name.strip() for name in policies.split(",") if name.strip()]
    try:
        for name in names:
            PLACEMENTS.check(name)
    except NotInstalledError as error:
        raise BenchError(f"--policies: {error}") from None
    if not names:
        raise BenchError("--policies: at least one is needed")
    size = QUICK if quick else Size(workers, minutes, sessions)
    predicted = range(FIT_DRAW + 1, FIT_DRAW + 1 + (1 if quick else draws))
    names = names[:1] if quick else names
    began_s, folder = time.monotonic(), _KeptRuns(cells)
    with progress_bar(3 + 2 * len(names) * len(predicted) + 3 * toys) as done:
        constants, fit = _fit(folder, size, names[0], done)
        runs: dict[str, list[dict[str, Any]]] = {}
        for name in names:
            runs[name] = [_pair(folder, Declared(size, name, draw), constants, done) for draw in predicted]
        stage_s = toyworld.QUICK_STAGE_S if quick else toyworld.STAGE_S
        toy = _toyworld(folder, stage_s, done) if toys else None
    return {
        "definitions": summary.DEFINITIONS,
        "source": source_digest(),
        "declared": {
            **asdict(size),
            "least_workers": size.least,
            "K": CAPACITY,
            "forward_s": {str(size_): seconds for size_, seconds in FORWARD_S.items()},
            "state_bytes": STATE_BYTES,
            "settings": dict(SETTINGS),
            "busiest": BUSIEST,
        },
        "constants": constants.to_json(),
        "fit": fit,
        **summary.summed(runs, [fit]),
        "toyworld": toy,
        "seconds": round(time.monotonic() - began_s, 1),
    }


class _KeptRuns:
    """Results of finished runs. Void runs get another name, so that they are repeated."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._results = folder, ResultFolder(folder)

    def get(self, key: str, function: Any, *arguments: Any) -> Any:
        """Return the result of a call, from the folder if it is there."""
        cell = PaperCell(NAME, key, function, arguments)
        result = self._results.run([cell], 1, lambda title: None)[cell]
        if result.get("void") is not None and self._folder is not None:
            file = self._folder / f"{cell.digest}.json"
            file.replace(file.with_suffix(".void"))
        return result


def _real(workers: int, minutes: float, sessions: int, policy: str, draw: int) -> dict[str, Any]:
    return real.run(Declared(Size(workers, minutes, sessions), policy, draw))


def _simulated(
    workers: int,
    minutes: float,
    sessions: int,
    policy: str,
    draw: int,
    start_s: float,
    extra_s: float,
    repeat: int,
) -> dict[str, Any]:
    declared = Declared(Size(workers, minutes, sessions), policy, draw)
    return simulated.simulate(declared, Constants(start_s, extra_s), repeat)


def _run_real(folder: _KeptRuns, run: Declared) -> Any:
    size = run.size
    arguments = (size.workers, size.minutes, size.sessions, run.policy, run.draw)
    return folder.get(f"real, {run.title}", _real, *arguments)


def _run_simulated(folder: _KeptRuns, run: Declared, constants: Constants, repeat: int = 0) -> Any:
    size = run.size
    arguments = (size.workers, size.minutes, size.sessions, run.policy, run.draw)
    times = (constants.start_s, constants.forward_extra_s)
    return folder.get(f"simulated, {run.title}, repeat {repeat}", _simulated, *arguments, *times, repeat)


def _predicted(folder: _KeptRuns, run: Declared, constants: Constants) -> dict[str, Any]:
    return prediction.predicted([_run_simulated(folder, run, constants, each) for each in range(REPEATS)])


def _fit(folder: _KeptRuns, size: Size, policy: str, done: Any) -> tuple[Constants, dict[str, Any]]:
    """Fit the constants on one draw. Returns them, and both sides with them."""
    run = Declared(size, policy, FIT_DRAW)
    measured = _run_real(folder, run)
    done(f"real, {run.title}")
    constants = fitted(measured, lambda each: _run_simulated(folder, run, each), run.title)
    done("fit")
    after = _predicted(folder, run, constants)
    done(f"simulated, {run.title}")
    return constants, summary.pair(run, measured, after)


def _pair(folder: _KeptRuns, run: Declared, constants: Constants, done: Any) -> dict[str, Any]:
    measured = _run_real(folder, run)
    done(f"real, {run.title}")
    predicted = _predicted(folder, run, constants)
    done(f"simulated, {run.title}")
    return summary.pair(run, measured, predicted)


def _toyworld(folder: _KeptRuns, stage_s: float, done: Any) -> dict[str, Any]:
    stages = folder.get("toyworld's profile", toyworld.measured_stages)
    done("toyworld's profile")
    measured = folder.get("real toyworld", toyworld.real, stage_s)
    done("real toyworld")

    def simulated_with(sharing: toyworld.Sharing, repeat: int) -> Any:
        arguments = (json.dumps(stages), stage_s, sharing.slowdown, sharing.p95, repeat)
        return folder.get(f"simulated toyworld, repeat {repeat}", toyworld.simulated, *arguments)

    sharing = toyworld.fitted(measured, simulated_with(toyworld.Sharing(), 0))
    predicted = toyworld.predicted([simulated_with(sharing, repeat) for repeat in range(REPEATS)])
    done("simulated toyworld")
    return summary.toyworld(stages, sharing, measured, predicted)


def table(result: Mapping[str, Any]) -> Table:
    """Format the errors by policy, and of toyworld."""
    columns = ("cost %", "p50 %", "p95 %", "late points", "migrations", "actions", "busy", "void")
    shown = Table("run", *columns, box=box.SIMPLE)
    for name, policy in result["policies"].items():
        for each in policy["draws"]:
            shown.add_row(f"{name}, draw {each['draw']}", *_cells(each))
    if result["toyworld"] is not None:
        for sessions, errors in result["toyworld"]["by_sessions"].items():
            cells = ("", _text(errors["p50_error_percent"]), _text(errors["p95_error_percent"]))
            void = result["toyworld"]["real"]["void"] or ""
            shown.add_row(f"toyworld, {sessions} sessions", *cells, "", "", "", "", void)
    identical = "identical" if result["decisions_identical"] else "DIFFERENT"
    shown.caption = f"decisions of new cores: {identical}; void runs: {result['void_runs']}"
    return shown


def _cells(each: Mapping[str, Any]) -> Sequence[str]:
    measured, predicted = each["real"], each["simulated"]
    actions = f"{each['actions_within']} of {each['actions_real']}, {each['actions_simulated']}"
    return (
        *(_text(each[name]) for name in ("cost_error_percent", "p50_error_percent", "p95_error_percent")),
        _text(each["late_points"]),
        f"{measured['migrations']}, {predicted['migrations']}",
        actions,
        _text(measured["cpu_busy"]),
        measured["void"] or "",
    )


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
