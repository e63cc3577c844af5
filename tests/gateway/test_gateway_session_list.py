"""`turboserve session list` in terminals of two widths."""

from __future__ import annotations

import asyncio

import pytest
from typer.testing import CliRunner

from tests.gateway.conftest import StartSession
from turboserve.cli.main import app

PROMPT = "a purple triangle moving upwards over the sea"


@pytest.mark.parametrize(("columns", "names_workers"), [(80, False), (140, True)])
async def test_the_list_breaks_no_word_of_a_prompt(
    gateway_url: str, start: StartSession, columns: int, names_workers: bool
) -> None:
    session = await start(PROMPT)

    def run() -> str:
        words = ["session", "list", "--url", gateway_url]
        done = CliRunner().invoke(app, words, env={"COLUMNS": str(columns)})
        assert done.exit_code == 0, done.output
        return done.output

    shown = await asyncio.to_thread(run)
    header, *lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert ("worker" in header.split()) == names_workers
    assert any(line.startswith(session["id"]) for line in lines)
    assert set(PROMPT.split()) <= set(shown.split())
