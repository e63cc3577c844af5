"""`turboserve keys`: its choice of the source, and keys of a file with scopes and expiry."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from turboserve.cli.keys import app
from turboserve.contracts.keys import Scope
from turboserve.gateway.auth import key_file
from turboserve.gateway.auth.access import Keys

UNSET = {"TURBOSERVE_URL": "", "TURBOSERVE_API_KEYS_FILE": "", "TURBOSERVE_API_KEY": ""}


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words), env=UNSET)
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["list"], "none is set"),
        (["list", "--file", "FILE", "--url", "http://127.0.0.1:1"], "both are set"),
        (["add", "acme", "--file", "FILE", "--operator", "--scope", "admin"], "give one of them"),
        (["add", "acme", "--file", "FILE", "--label", "x"], "--label"),
        (["add", "acme", "--file", "FILE", "--expires", "2020-01-01"], "not in the future"),
        (["list", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, words: list[str], reason: str) -> None:
    file = str(tmp_path / "keys.json")
    status, shown, told = run(*(file if word == "FILE" else word for word in words))
    assert (status, shown) == (1, "")
    assert reason in told
    assert not Path(file).exists()


def test_a_key_of_a_file_has_scopes_and_expires(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    words = ("add", "acme", "--file", str(file), "--scope", "sessions:read", "--expires", "2099-01-01")
    status, shown, _ = run(*words, "--json")
    assert status == 0
    made = json.loads(shown)
    assert (made["scopes"], made["expires_at"]) == (["sessions:read"], "2099-01-01T00:00:00+00:00")
    found = Keys(key_file.read(file)).identify(made["key"])
    assert found is not None
    assert {scope for scope in Scope if found.may(scope)} == {Scope.SESSIONS_READ}
    _, text = key_file.add(file, "acme", expires_at=time.time() - 1.0)
    assert Keys(key_file.read(file)).identify(text) is None
    status, shown, _ = run("list", "--file", str(file), "--json")
    assert json.loads(shown.splitlines()[0])["id"] == made["id"]
    assert made["key"] not in shown
    status, shown, _ = run("revoke", made["id"], "--file", str(file), "--json")
    assert (status, json.loads(shown)["id"]) == (0, made["id"])


def test_a_file_without_new_fields_stays_as_earlier_versions_read_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    assert run("add", "acme", "--file", str(file), "--operator")[0] == 0
    [key] = json.loads(file.read_text())["keys"]
    assert set(key) == {"id", "tenant", "operator", "created_at", "hash"}
