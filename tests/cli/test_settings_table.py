"""The table of settings in the documentation is the one that the code gives."""

from __future__ import annotations

from pathlib import Path

from turboserve.cli.settings import BEGIN, END, markdown, rows

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_the_documented_table_is_true() -> None:
    text = OPERATIONS.read_text()
    table = text.split(BEGIN)[1].split(END)[0].strip()
    assert table == markdown(), "run `turboserve settings` and put its output between the markers"


def test_every_setting_says_what_it_means() -> None:
    silent = [variable for variable, _, _, meaning in rows() if not meaning]
    assert not silent, f"settings without a docstring: {silent}"


def test_no_variable_is_listed_twice() -> None:
    variables = [variable for variable, *_ in rows()]
    assert len(variables) == len(set(variables))
