"""The examples of the documents, run as shown, against the whole stack. One document is one test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.helpers.document_examples import ON_THE_STACK, examples
from tests.helpers.example_runner import ExampleRunner
from turboserve.cli.main import app
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack


@pytest.fixture
def cleaned_stack(stack: BackgroundStack) -> Iterator[BackgroundStack]:
    """The shared stack. After the test, its sessions end and its webhooks are removed."""
    yield stack
    with httpx.Client(base_url=stack.url, timeout=60.0) as api:
        for session in api.get("/v1/sessions").json()["sessions"]:
            if session["activity"] != "ended":
                api.delete(f"/v1/sessions/{session['id']}")
        for webhook in api.get("/v1/webhooks").json()["webhooks"]:
            api.delete(f"/v1/webhooks/{webhook['id']}")


# Each command and request has its own limit. A document has up to a dozen of them, and the machine is busy.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", ON_THE_STACK)
def test_the_examples_run(cleaned_stack: BackgroundStack, tmp_path: Path, document: str) -> None:
    variables = {"KEY": "any-key-0123456789"}  # Without keys, any key is taken.
    if document == "docs/how-to/webhooks.md":
        variables["TURBOSERVE_URL"] = cleaned_stack.url
    runner = ExampleRunner(cleaned_stack.url, cleaned_stack.record.data, tmp_path, variables)
    for example in examples(document):
        if example.reason_not_run is None:
            runner.run(example)


def test_commands_of_webhooks_print_json(cleaned_stack: BackgroundStack) -> None:
    def run(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["webhooks", *words, "--url", cleaned_stack.url, "--json"])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    name = run("add", "https://hooks.example.com/x", "--label", "one")["id"]
    assert run("change", name, "--label", "two")["label"] == "two"
    assert run("disable", name)["enabled"] is False
    assert run("enable", name)["enabled"] is True
    event = run("test", name)["event"]
    assert run("redeliver", name, event)["event"] == event
    assert run("remove", name) == {"id": name, "removed": True}
