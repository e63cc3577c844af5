"""The tables of `turboserve webhooks`."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from turboserve.cli import webhooks
from turboserve.ids import new_id


def test_ids_of_events_are_whole_in_a_terminal_of_usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: ids were cut, although `redeliver` takes one."""
    event, session = new_id("ev"), new_id("ses")
    delivery: dict[str, Any] = {
        "event": event,
        "type": "session.activity_changed",
        "session": session,
        "state": "waiting",
        "attempts": 3,
        "status": 503,
        "error": "the receiver answered 503 Service Unavailable",
        "next_attempt_at": "2026-11-22T21:04:05.250000Z",
    }
    monkeypatch.setattr(webhooks, "listed", lambda *_: ([delivery], None))
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(webhooks.app, ["deliveries", new_id("wh"), "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 0, done.output
    assert event in done.output
    assert "…" not in done.output
