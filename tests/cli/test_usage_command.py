"""`turboserve usage`: its table for answers of gateways of this and of an earlier version."""

from __future__ import annotations

from typing import Any

import pytest

from turboserve.cli.usage import _print

EARLIER: dict[str, Any] = {
    "day": "2026-11-24",
    "tenant": "acme",
    "key": None,
    "gpu_seconds": 1.0,
    "money": 0.5,
    "chunks": 3,
    "viewer_seconds": 4.0,
}


def test_hours_and_models_have_columns_where_the_answer_has_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fine = {"hour": "2026-11-24T13:00:00.000000Z", "model": "toyworld", "width": 64, "height": 48}
    _print([EARLIER | fine, EARLIER | {**fine, "hour": None, "width": None}], "EUR")
    lines = [line for line in capsys.readouterr().out.splitlines() if "acme" in line]
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")][3:5] for line in lines]
    assert cells == [["13:00", "toyworld 64x48"], ["–", "toyworld"]]


@pytest.mark.parametrize(
    ("further", "shown"),
    [({}, ["–", "4.0", "–"]), ({"video_seconds": 2.25, "delivered_bytes": 7_000_000}, ["2.2", "4.0", "7.0"])],
)
def test_what_a_gateway_does_not_say_is_a_dash(
    further: dict[str, Any], shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _print([EARLIER | further], "EUR")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "acme" in line]
    assert [cell.strip() for cell in line.strip("│ ").split("│")][-3:] == shown
