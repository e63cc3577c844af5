"""Traces that are drawn to published statistics, the files of traces, and their command."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from turboserve.autoscaler.control.events import SessionChange
from turboserve.cli.main import app
from turboserve.contracts.errors import InvalidInputError
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.published import PUBLISHED, differences, published
from turboserve.experiments.autoscale.trace import (
    COLUMNS,
    MAY_FOLLOW,
    Step,
    WorkloadTrace,
    read,
    table_schema,
    write,
)

TOTALS = {"M": (200, 155), "T1": (358, 320), "T2": (1076, 788), "T3": (798, 562), "T4": (1404, 1200),
          "T5": (4310, 3150), "T6": (3192, 2252)}  # fmt: skip
"""Total arrivals and departures: the last column of Table 12, and the sums of Table 11."""


def means(trace: WorkloadTrace, window_s: float) -> list[float]:
    """Sample the active sessions once a second, without the code under test."""
    steps, active = deque(trace.steps), set[str]()
    samples: list[list[int]] = [[] for _ in range(5)]
    for second in range(round(5 * window_s)):
        while steps and steps[0].at <= second:
            step = steps.popleft()
            if step.kind in (SessionChange.ARRIVAL, SessionChange.ACTIVATION):
                active.add(step.session)
            else:
                active.discard(step.session)
        samples[int(second / window_s)].append(len(active))
    return [fmean(each) for each in samples]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_totals_are_those_of_the_paper(name: str) -> None:
    windows = PUBLISHED[name].windows
    assert (sum(w.arrivals for w in windows), sum(w.departures for w in windows)) == TOTALS[name]


@pytest.mark.parametrize("draws", [3, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_draws_have_the_published_statistics(name: str, draws: int) -> None:
    statistics = PUBLISHED[name]
    digests = set()
    for seed in range(draws):
        trace = production(name, seed)
        digests.add(trace.digest)
        for index, (window, mean) in enumerate(
            zip(statistics.windows, means(trace, statistics.window_s), strict=True)
        ):
            within = [
                step
                for step in trace.steps
                if step.at > 0 and index <= step.at / statistics.window_s < index + 1
            ]
            arrivals = sum(step.kind is SessionChange.ARRIVAL for step in within)
            departures = sum(step.kind is SessionChange.DEPARTURE for step in within)
            assert arrivals == pytest.approx(window.arrivals, rel=0.03)
            assert departures == pytest.approx(window.departures, rel=0.03)
            assert mean == pytest.approx(window.active, rel=0.03)
        assert all(difference.within for difference in differences(trace, statistics))
        assert {s.session for s in trace.steps if s.at == 0} == {
            f"s{n:05d}" for n in range(statistics.present)
        }
    assert len(digests) == draws


@pytest.mark.parametrize(("name", "window_s"), [("M", 52.0), ("T1", 600.0), ("T3", 600.0), ("T4", 60.0)])
def test_windows_may_have_another_length(name: str, window_s: float) -> None:
    trace = production(name, 1, window_s)
    assert trace.ends_s == 5 * window_s
    assert all(difference.within for difference in differences(trace, published(name, window_s)))
    with pytest.raises(InvalidInputError) as caught:
        differences(trace, PUBLISHED[name])
    assert caught.value.field == "ends_s"


def test_a_draw_is_reproduced_by_its_seed() -> None:
    assert production("T1", 4) == production("T1", 4)


@pytest.mark.parametrize(("name", "window_s", "field"), [("T7", None, "trace"), ("T1", 1.0, "window_s")])
def test_what_cannot_be_drawn_is_refused(name: str, window_s: float | None, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        production(name, 0, window_s)
    assert caught.value.field == field
    assert caught.value.limit is not None


class TestFiles:
    def test_a_quiet_tail_is_kept(self, tmp_path: Path) -> None:
        trace = WorkloadTrace("t", (Step(1.0, "a", SessionChange.ARRIVAL),), 60.0)
        write(trace, tmp_path / "t.csv")
        assert read(tmp_path / "t.csv") == trace

    @pytest.mark.parametrize(
        ("rows", "field"),
        [
            (["1,a,arrival", "9,a,end"], "t.csv[1].session"),
            (["1,a,arrival", "soon,,end"], "t.csv[1].time_s"),
            (["1,a,arrival", "0.5,,end"], "t.csv.ends_s"),
            (["1,a,arrival", "5,,end", "6,a,departure"], "t.csv[1].session"),
        ],
    )
    def test_a_bad_end_is_named(self, tmp_path: Path, rows: list[str], field: str) -> None:
        path = tmp_path / "t.csv"
        path.write_text("\n".join([",".join(COLUMNS), *rows]))
        with pytest.raises(InvalidInputError) as caught:
            read(path)
        assert caught.value.field == field

    def test_the_schema_has_the_columns_and_every_event(self) -> None:
        fields = table_schema()["fields"]
        assert tuple(field["name"] for field in fields) == COLUMNS
        events = {*MAY_FOLLOW, "end"} - {None}
        assert set(fields[2]["constraints"]["enum"]) == events


class TestCommand:
    def test_a_drawn_file_passes_its_check(self, tmp_path: Path) -> None:
        file = tmp_path / "m.csv"
        words = ["trace", "draw", "M", "--seed", "2", "--out", str(file)]
        drawn = CliRunner().invoke(app, words)
        assert drawn.exit_code == 0, drawn.output
        assert production("M", 2).digest in drawn.output
        again = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
        assert (again["file"], again["digest"]) == (str(file), production("M", 2).digest)
        checked = CliRunner().invoke(app, ["trace", "check", str(file), "--published", "M"])
        assert checked.exit_code == 0, checked.output
        assert checked.output.count("mean active") == 5

    def test_another_trace_fails_the_check(self, tmp_path: Path) -> None:
        file = tmp_path / "t.csv"
        write(production("T1", 0), file)
        checked = CliRunner().invoke(app, ["trace", "check", str(file), "--published", "T2"])
        assert checked.exit_code == 1
        assert "of 15 statistics differ" in checked.output
        words = ["trace", "check", str(file), "--published", "T2", "--json"]
        checked = CliRunner().invoke(app, words)
        assert checked.exit_code == 1
        statistics = json.loads(checked.stdout)["statistics"]
        assert len(statistics) == 15
        assert not all(each["within"] for each in statistics)

    def test_errors_name_the_row(self, tmp_path: Path) -> None:
        file = tmp_path / "t.csv"
        file.write_text("time_s,session,event\n1,a,arrival\n0,a,departure\n")
        checked = CliRunner().invoke(app, ["trace", "check", str(file)])
        assert checked.exit_code == 1
        assert "t.csv[1].time_s" in checked.output
        unknown = CliRunner().invoke(app, ["trace", "draw", "T9", "--out", str(file)])
        assert unknown.exit_code == 1
        assert "M, T1, T2" in unknown.output
