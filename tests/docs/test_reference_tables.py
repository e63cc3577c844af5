"""The generated tables of the documentation are the ones that the code gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turboserve.cli.reference import TABLES, markers, tables_in
from turboserve.cli.reference.events import types
from turboserve.cli.reference.text import docstring
from turboserve.cli.settings import rows

DOCS = Path(__file__).parents[2] / "docs"
REMEDY = "run `.venv/bin/turboserve reference --update docs`"


def documented(table: str) -> list[str]:
    """This table wherever a document holds it."""
    texts = [file.read_text() for file in sorted(DOCS.rglob("*.md"))]
    return [found[table] for text in texts if table in (found := tables_in(text))]


@pytest.mark.parametrize("table", TABLES)
def test_a_documented_table_is_what_the_command_prints(table: str) -> None:
    # In a process of its own: OpenTelemetry takes one provider of meters per process.
    command = [sys.executable, "-m", "turboserve.cli.main", "reference", table]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert printed.count("\n") > 5
    assert documented(table) == [printed], REMEDY


def test_update_rewrites_only_what_stands_between_the_markers(tmp_path: Path) -> None:
    begin, end = markers("subjects")
    file = tmp_path / "page.md"
    file.write_text(f"# Before\n\n{begin}\nold\n{end}\n\nAfter\n")
    command = [sys.executable, "-m", "turboserve.cli.main", "reference", "--update", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    text = file.read_text()
    assert text.startswith(f"# Before\n\n{begin}\n| subject |")
    assert text.endswith(f"{end}\n\nAfter\n")
    assert "old" not in text


def test_every_setting_says_what_it_means() -> None:
    silent = [variable for variable, _, _, meaning in rows() if not meaning]
    assert not silent, f"settings without a docstring: {silent}"


def test_no_variable_is_listed_twice() -> None:
    variables = [variable for variable, *_ in rows()]
    assert len(variables) == len(set(variables))


def test_every_event_says_what_it_means() -> None:
    silent = [name for name, kind in types() if not docstring(kind)]
    assert not silent, f"events without a docstring: {silent}"


def test_every_metric_says_what_it_means() -> None:
    [table] = documented("metrics")
    silent = [line for line in table.splitlines() if line.endswith("|  |")]
    assert not silent, f"metrics without a description: {silent}"
