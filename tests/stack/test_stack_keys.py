"""`turboserve up --auth` and `turboserve keys --url`: from the first start to a key that is revoked.

The same stack runs the examples of the documents about keys.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from tests.helpers.document_examples import WITH_KEYS, examples
from tests.helpers.example_runner import ExampleRunner
from tests.helpers.waiting import eventually_blocking
from turboserve.cli.keys import app as keys_command
from turboserve.cli.stack.background import BackgroundStack

KEY = re.compile(r"ts_([0-9a-f]{16})_[0-9a-f]{48}")
NO_KEYS = {"TURBOSERVE_API_KEYS": "", "TURBOSERVE_API_KEYS_FILE": "", "TURBOSERVE_OPERATORS": ""}


def stack_with_keys(data: Path) -> BackgroundStack:
    """A stack without workers, which keys do not need."""
    return BackgroundStack(data, "--auth", "--workers", "0", environment=NO_KEYS)


def keys(url: str, admin: str, *words: str, status: int = 0) -> list[dict[str, Any]]:
    """Run `turboserve keys WORDS --json`. Returns the printed objects."""
    environment = {"TURBOSERVE_URL": url, "TURBOSERVE_API_KEY": admin, "TURBOSERVE_API_KEYS_FILE": ""}
    done = CliRunner().invoke(keys_command, [*words, "--json"], env=environment)
    assert done.exit_code == status, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def answer(url: str, key: str) -> int:
    return httpx.get(f"{url}/v1/sessions", headers={"Authorization": f"Bearer {key}"}, timeout=60).status_code


def run_examples(stack: BackgroundStack, admin: str, folder: Path) -> None:
    known = {"TURBOSERVE_URL": stack.url, "TURBOSERVE_API_KEY": admin, "KEY": admin}
    for document in WITH_KEYS:
        runner = ExampleRunner(stack.url, str(stack.data), folder, known)
        runner.set_id("ts", admin)
        runner.set_id("key", admin.split("_")[1])
        for example in examples(document):
            if example.reason_not_run is None:
                runner.run(example)


def test_the_first_start_shows_a_key_and_later_ones_do_not(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with stack_with_keys(data) as stack:
        stack.wait(lambda: bool(KEY.search(stack.output)), 120)
        found = KEY.search(stack.output)
        assert found is not None
        admin, key_id = found.group(), found[1]
        assert httpx.get(f"{stack.url}/v1/sessions", timeout=60).status_code == 401
        # The key is shown once the gateway accepts it. If that takes long, it is shown with a warning.
        assert answer(stack.url, admin) == 200 or "not every gateway accepts the admin key" in stack.output
        eventually_blocking(lambda: answer(stack.url, admin) == 200)
        assert "API keys: in the database" in stack.output

        made = keys(stack.url, admin, "add", "acme", "--label", "for CI", "--scope", "sessions:read")[0]
        assert (made["tenant"], made["scopes"], made["label"]) == ("acme", ["sessions:read"], "for CI")
        eventually_blocking(lambda: answer(stack.url, made["key"]) == 200)
        assert {one["id"] for one in keys(stack.url, admin, "list")} == {key_id, made["id"]}
        # This key may not order keys.
        assert keys(stack.url, made["key"], "list", status=1) == []
        [revoked] = keys(stack.url, admin, "revoke", made["id"])
        assert revoked["revoked_at"] is not None
        eventually_blocking(lambda: answer(stack.url, made["key"]) == 401)
        assert keys(stack.url, admin, "revoke", "no_key", status=1) == []
        logs = [path.read_text() for path in data.rglob("*.log")]
        assert logs
        assert not any(admin in text or made["key"] in text for text in logs)
        run_examples(stack, admin, tmp_path)

    before = len(stack.output)
    with stack:
        stack.wait(lambda: f"The key {key_id} has the scope admin" in stack.output[before:], 120)
        assert not KEY.search(stack.output[before:])
        eventually_blocking(lambda: answer(stack.url, admin) == 200)
