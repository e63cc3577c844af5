"""What programs and people read of the command's output: `--json`, and progress on terminals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from turboserve.cli.main import app
from turboserve.cli.progress import progress

COMMANDS_WITHOUT_JSON = {
    "up": "prints its logs as JSON with --log-format json",
    "bench": "its benchmarks have it",
    "profile engine": "writes JSON to --out",
    "profile fidelity": "writes JSON to --out",
    "profile autoscaler": "writes JSON to --out",
    "trace schema": "prints JSON",
}
"""Command → why it has no `--json`."""


def commands(command: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the options of each command."""
    if not hasattr(command, "commands"):
        yield name, {option for parameter in command.params for option in parameter.opts}
        return
    for part, inner in command.commands.items():
        yield from commands(inner, f"{name} {part}".strip())


def test_every_command_prints_json_or_needs_not() -> None:
    found = dict(commands(typer.main.get_command(app)))
    assert {"session create", "keys list", "down", "webhooks test"} <= set(found)
    assert {name for name, options in found.items() if "--json" not in options} == set(COMMANDS_WITHOUT_JSON)


def test_a_terminal_shows_progress_and_a_file_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Variables by which the library for progress decides what a terminal is.
    monkeypatch.setenv("TERM", "xterm")
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("generating", 2.0) as advance:
        advance(1.0)
    shown = capsys.readouterr()
    assert "generating" in shown.err
    assert not shown.out
    monkeypatch.delenv("FORCE_COLOR")
    with progress("generating", 2.0) as advance:
        advance(1.0)
    assert capsys.readouterr() == ("", "")
