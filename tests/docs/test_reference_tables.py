"""The generated tables of the documentation equal those that the code gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.helpers import forked_process
from turboserve.cli import main
from turboserve.cli.reference import TABLES, markers, tables_in
from turboserve.cli.reference import reference as command
from turboserve.cli.reference.events import types
from turboserve.cli.settings import rows
from turboserve.cli.tables import docstring

DOCS = Path(__file__).parents[2] / "docs"
REMEDY = "run `.venv/bin/turboserve reference --update docs`"


def reference(*arguments: str) -> str:
    """Return the output of the command, run in a process of its own:

    OpenTelemetry allows one provider each.
    """
    done = forked_process.run(["-m", "turboserve.cli.main", "reference", *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def documented(table: str) -> list[str]:
    """Return this table from every document that contains it."""
    texts = [file.read_text() for file in sorted(DOCS.rglob("*.md"))]
    return [found[table] for text in texts if table in (found := tables_in(text))]


def test_every_table_is_in_one_document() -> None:
    assert {table: len(documented(table)) for table in TABLES} == dict.fromkeys(TABLES, 1)


def test_the_documented_tables_are_what_the_command_makes(tmp_path: Path) -> None:
    copy = shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("*.png"))
    begin, end = markers("subjects")
    stale = copy / "stale.md"
    stale.write_text(f"# Before\n\n{begin}\nold\n{end}\n\nAfter\n")
    assert reference("--update", str(copy)) == f"updated {stale}\n", REMEDY
    [subjects] = documented("subjects")
    assert stale.read_text() == f"# Before\n\n{begin}\n{subjects}\n{end}\n\nAfter\n"


def test_the_command_prints_one_table() -> None:
    assert [reference("events").strip()] == documented("events")


@pytest.mark.parametrize("table", TABLES)
def test_the_json_of_a_table_has_its_lines(table: str) -> None:
    [markdown] = documented(table)
    _, _, *lines = markdown.splitlines()
    records = json.loads(reference(table, "--json"))
    assert len(records) == len(lines)
    for record, line in zip(records, lines, strict=True):
        cells = [", ".join(cell) if isinstance(cell, list) else cell for cell in record.values()]
        assert " | ".join(cells).replace("`", "") in line.replace("`", "")


def test_the_settings_are_printed_as_json() -> None:
    done = CliRunner().invoke(main.app, ["settings", "--json"])
    assert done.exit_code == 0
    found = {each["variable"]: each for each in json.loads(done.output)}
    assert found["TURBOSERVE_MAX_LEAD_S"].keys() == {"variable", "read_by", "default", "meaning"}
    assert found["TURBOSERVE_MAX_LEAD_S"]["read_by"] == "worker"
    assert len(found) == len(rows())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["settings", "--update", "."], "takes no table"),
        (["--update", "missing"], "does not exist"),
        (["--update", "empty"], "holds a table"),
        (["--update", "cut"], "the table subjects needs one line"),
        (["--update", "empty", "--json"], "leave out --json"),
        (["nothing"], "name one of"),
    ],
)
def test_the_command_refuses_what_would_update_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "page.md").write_text(f"{markers('subjects')[0]}\nold\n")
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, arguments, env={"TERMINAL_WIDTH": "300", "COLUMNS": "300"})
    assert done.exit_code == 2
    assert reason in done.output


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
    lines = table.splitlines()[2:]
    assert {line.split(" | ")[2] for line in lines} == {
        "gateway",
        "scheduler",
        "autoscaler",
        "worker",
        "state-store",
        "recorder",
        "webhooks",
        "all",
    }
    silent = [line for line in lines if line.endswith("|  |")]
    assert not silent, f"metrics without a description: {silent}"
