"""`turboserve bench report`: verdicts, charts, and a page without scripts or network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from turboserve.bench.report import BenchError
from turboserve.experiments.paper import batching, timeline
from turboserve.experiments.paper.command import EXPERIMENTS
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.report.command import run, table
from turboserve.experiments.report.results import RESULTS, TITLES, Result
from turboserve.experiments.report.svg import Bars, Series, Span, axis, bars, lanes, lines

QUICK = Scale(quick=True, draws=1)


@pytest.mark.parametrize(
    ("ours", "paper", "lower", "width", "verdict"),
    [
        (90.0, 100.0, True, None, "better"),
        (90.0, 100.0, False, None, "worse"),
        (90.0, 100.0, True, 11.0, "equal"),
        (101.0, 100.0, True, None, "equal"),
        (-5.0, 6.1, True, 0.5, "better"),
        (5.0, None, True, None, "new"),
    ],
)
def test_a_verdict_follows_from_the_numbers(
    ours: float, paper: float | None, lower: bool, width: float | None, verdict: str
) -> None:
    result = Result("a cost", " s", ours, paper, lower, width)
    assert result.verdict == verdict
    word = {"better": "better than", "worse": "worse than", "equal": "equal to", "new": "no reference"}
    assert word[verdict] in result.sentence


def test_an_axis_holds_its_values_between_round_ticks() -> None:
    for values in ([0.0, 7.3], [-12.0, 30.0], [5.0, 5.0], [0.001, 0.0042]):
        found = axis(values, 0.0, 100.0)
        assert found.ticks[0] <= min(*values, 0.0)
        assert found.ticks[-1] >= max(values)
        assert len(found.ticks) <= 9
        assert found.at(found.low) == 0
        assert found.at(found.high) == 100


def numbers(path: str) -> list[float]:
    return [float(text) for text in re.findall(r"-?\d+\.?\d*", path)]


def test_charts_stay_within_their_frame_and_escape_names() -> None:
    charts = (
        lines("a < b", "x", "y", [Series("one", [(0, 1), (5, 9)], [1, None]), Series("two", [(2, 4)])]),
        bars("bars", "s", [Bars("up", 3.0, 5.0, 1.0), Bars("down", None, -2.0)]),
        lanes("lanes", 2, [Span(0, 0, 0.0, 9.0), Span(1, 3, 2.0, 5.0)], 10.0, "session", [(4.0, 1)]),
    )
    assert "a &lt; b" in charts[0]
    for chart in charts:
        _, _, width, height = numbers(re.findall(r'viewBox="([^"]*)"', chart)[0])
        for at in re.findall(r' (?:cx|x)="([^"]*)"', chart):
            assert 0 <= float(at) <= width
        for at in re.findall(r' (?:cy|y)="([^"]*)"', chart):
            assert 0 <= float(at) <= height


class Tags(HTMLParser):
    """Checks that every element is closed in order, and collects addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    small = {}
    for cell in batching.cells(QUICK):
        profile, sweep, seed, _ = cell.arguments
        small[cell] = batching.run(profile, sweep, seed, 40)
    drawn = {cell: timeline.run(*cell.arguments) for cell in timeline.cells(QUICK)}
    reports = {"batching": batching.report(QUICK, small), "timeline": timeline.report(QUICK, drawn)}
    reports["batching"]["cells"] = {"one": [1, 2, 3]}
    reports["table2"] = {"error": "ZeroDivisionError: no draws", "traceback": "…", "cells": {}}
    value = {"source": "0123", "quick": True, "seeds": [0], "experiments": reports}
    (folder / "a.json").write_text(json.dumps(value))
    row = {"cost_of_oracle": 1.1, "late_activations": 3, "activations": 9,
           "dearer_than_constant_percent": -8.0, "dearer_than_utilization_percent": None}  # fmt: skip
    (folder / "b.json").write_text(json.dumps({"unseen": {"<T9>": {"learned": row, "shipped_table": row}}}))
    (folder / "other.json").write_text('{"bench": "stream"}')
    return folder


def test_the_page_is_whole_and_needs_no_network(results: Path) -> None:
    found = run(results, data=results / "small")
    assert run(results / "small")["experiments"] == found["experiments"]
    assert (results / "small" / "a.json").stat().st_size < (results / "a.json").stat().st_size
    text = (results / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not tags.seen & {"script", "link", "img", "iframe"}
    assert all(address.startswith("#") for address in tags.addresses)
    assert "url(" not in text
    assert "&lt;T9&gt;" in text
    failed = "a.json: table2, ZeroDivisionError: no draws"
    assert found["left_out"] == [failed, "other.json"]
    assert "table2" not in found["experiments"]
    assert f"left out: {failed}" in table(found)
    assert found["experiments"]["unseen"]["verdicts"] == ["better"]
    assert found["bytes"] == len(text.encode()) < 300_000
    assert "better" in table(found)


def test_a_timeline_has_every_session_and_its_migrations(results: Path) -> None:
    found = json.loads((results / "a.json").read_text())["experiments"]["timeline"]["timelines"]
    assert found.keys() == set(timeline.SYSTEMS)
    for line in found.values():
        assert all(begins < ends for _, _, begins, ends in line["spans"])
        by_session: dict[int, list[list[int]]] = {}
        for span in line["spans"]:
            by_session.setdefault(span[0], []).append(span)
        changes = {(two[2], session) for session, spans in by_session.items()
                   for one, two in pairwise(sorted(spans, key=lambda span: span[2]))
                   if one[3] == two[2] and one[1] != two[1]}  # fmt: skip
        assert {(at, session) for at, session in line["migrated"]} == changes


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="not a folder"):
        run(tmp_path / "none")
    with pytest.raises(BenchError, match="no results"):
        run(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(BenchError, match=r"x\.json cannot be read"):
        run(tmp_path)
    (tmp_path / "x.json").write_text('{"experiments": {"table2": {"ours": {}}}}')
    with pytest.raises(BenchError, match="another version"):
        run(tmp_path)


def test_every_experiment_is_on_the_page() -> None:
    assert RESULTS.keys() == EXPERIMENTS.keys()
    assert TITLES.keys() == {*EXPERIMENTS, "unseen"}
