"""`turboserve session list` in terminals of two widths."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.gateway.conftest import FailSessionOf, StartSession
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


async def test_a_failed_session_has_its_reason(
    gateway_url: str, start: StartSession, fail: FailSessionOf, tmp_path: Path
) -> None:
    session = await start(PROMPT)
    await fail(session["id"], "out of memory")

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["session", *words, "--url", gateway_url], env={"COLUMNS": "140"})
        assert done.exit_code == 0, done.output
        return done.output

    shown = await asyncio.to_thread(run, "list", "--all")
    [line] = [line for line in shown.splitlines() if line.startswith(session["id"])]
    assert line.split()[1] == "failed"
    assert {"out", "of", "memory"} <= set(shown.split())
    watched = await asyncio.to_thread(run, "watch", session["id"])
    assert watched.splitlines()[-1] == "failed: out of memory"
    record = ("record", session["id"], "--output", str(tmp_path / "video.mp4"))
    recorded = await asyncio.to_thread(run, *record)
    assert recorded.splitlines()[-1].endswith(" s; failed: out of memory")
    as_json = await asyncio.to_thread(run, *record, "--json")
    end = json.loads(as_json.splitlines()[-1])["end"]
    assert (end["phase"], end["reason"]) == ("failed", "out of memory")
