"""Runs the examples of a document as its reader does: in order, in one folder, against one stack."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import av
import httpx
from typer.testing import CliRunner

from tests.helpers.document_examples import Example
from turboserve.cli.main import app

LIMIT_S = 120.0
IN_TWO_DAYS = (datetime.now(UTC) + timedelta(days=2)).date().isoformat()
"""Tomorrow would be past for tests that still run after midnight."""
REPLACED = (
    # The environment of the tests has the command on its path.
    (r"\.venv/bin/", ""),
    (r"expires \d{4}-\d\d-\d\d", f"expires {IN_TWO_DAYS}"),
    (r'"expires_at": "\d{4}-\d\d-\d\d', f'"expires_at": "{IN_TWO_DAYS}'),
    # Shorter videos.
    (r"--seconds \d+", "--seconds 2"),
    (r"\bseconds=\d+", "seconds=2"),
)
"""What a document shows → what runs. Addresses and ids are those of the stack: see `_substituted`."""
SHOWN_ID = re.compile(r"\b(ses|lnk|tst|ts|wh|ev)_[0-9a-z]*(?:…|\b)")
SHOWN_KEY_ID = re.compile(r"\b2d06c5c4(?:a1b2c3d4)?\b")
PRINTED_ID = re.compile(r'(?:^|"(?:id|ticket)": ?")((ses|lnk|tst|ts|wh|ev)_[\w.-]+)', re.MULTILINE)
EVENT_LINE = re.compile(r"(?:id|event|data): ?\S")
"""Begins each line of an event. The stream has other lines, too: `retry`, and comments."""
CURL = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'


class ExampleRunner:
    """Knows what the reader of one document knows: the ids that were printed, and the exported variables."""

    def __init__(self, url: str, data: str, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: those that the document presupposes."""
        self._url, self._folder = url, folder
        self._variables = {"HOME": str(folder), "TURBOSERVE_DATA": data, **(variables or {})}
        self._ids: dict[str, str] = {}

    def set_id(self, kind: str, value: str) -> None:
        """Set the id of this kind that later examples use, as if an example had printed it."""
        self._ids[kind] = value

    def run(self, example: Example) -> str:
        """Run an example. Returns its output. Raises AssertionError if it fails or prints something else."""
        text = self._substituted(example.text)
        printed = self._python(text) if example.kind == "python" else self._command(text)
        for value, kind in PRINTED_ID.findall(printed):
            self._ids[kind] = value
            if kind == "ts":
                self._ids["key"] = value.split("_")[1]
        check_shown(example.shown, printed)
        return printed

    def _substituted(self, text: str) -> str:
        text = re.sub(r"(?:localhost|127\.0\.0\.1):8080", urlsplit(self._url).netloc, text)
        for shown, real in REPLACED:
            text = re.sub(shown, real, text)
        text = SHOWN_KEY_ID.sub(lambda _: self._ids["key"], text)
        return SHOWN_ID.sub(lambda found: self._ids.get(found[1]) or self._id_of_new_session(found[1]), text)

    def _id_of_new_session(self, kind: str) -> str:
        assert kind == "ses", f"the document has printed no {kind}_"
        answer = httpx.post(f"{self._url}/v1/sessions", json={"prompt": "a red circle"}, timeout=LIMIT_S)
        self._ids[kind] = answer.raise_for_status().json()["id"]
        return self._ids[kind]

    def _python(self, text: str) -> str:
        printed = io.StringIO()
        with contextlib.chdir(self._folder), contextlib.redirect_stdout(printed):
            exec(compile(text, "example", "exec"), {"__name__": "__main__"})
        assert printed.getvalue().strip()
        return printed.getvalue()

    def _command(self, text: str) -> str:
        program, *words = shlex.split(text, comments=True)
        if program == "export":
            for name, _, value in (word.partition("=") for word in words):
                self._variables[name] = re.sub(r"\$(\w+)", lambda found: self._variables[found[1]], value)
            return ""
        if program == "unset":
            for name in words:
                del self._variables[name]
            return ""
        if program == "turboserve":
            return self._turboserve(words)
        if program == "ffplay":
            return self._played(words[-1])
        assert program == "curl", f"no rule runs {program}"
        return self._curl(text, endless="-N" in words)

    def _turboserve(self, words: list[str]) -> str:
        unset = {name: None for name in os.environ if name.startswith("TURBOSERVE_")}
        with contextlib.chdir(self._folder):
            done = CliRunner().invoke(app, words, env={**unset, **self._variables})
        assert done.exit_code == 0, (words, done.output, done.exception)
        return done.output

    def _played(self, address: str) -> str:
        """Show one frame, with the libraries of `ffplay`."""
        with av.open(address, timeout=LIMIT_S) as container:
            assert next(container.decode(video=0)).width
        return ""

    def _curl(self, text: str, *, endless: bool) -> str:
        command = ["bash", "-c", CURL + text]
        variables = {"PATH": os.environ["PATH"], **self._variables}
        options: dict[str, Any] = {"cwd": self._folder, "env": variables, "text": True}
        if not endless:
            done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, **options)
            assert done.returncode == 0, (text, done.stdout, done.stderr)
            return str(done.stdout)
        # It prints events until its reader ends it.
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, **options) as process:
            end = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGTERM))
            end.start()
            try:
                assert process.stdout is not None
                lines: list[str] = []
                while not (lines and EVENT_LINE.match(lines[-1])):
                    lines.append(str(process.stdout.readline()))
                    assert lines[-1], f"{text} ended without an event: {lines}"
                assert process.poll() is None, f"{text} ended after its first event"
            finally:
                end.cancel()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
        return "".join(lines)


def check_shown(shown: tuple[str, ...], printed: str) -> None:
    """Check that `printed` has the lines that a document shows, with ids and numbers of its own.

    Of an object in JSON, it has the members.
    """
    for line in shown:
        if line.startswith("{"):
            missing = [name for name in re.findall(r'"(\w+)":', line) if f'"{name}":' not in printed]
            assert not missing, (line, printed)
            continue
        parts = re.split(r"([\d.,]*\d|…)", line)
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = (r"\w+" if part == "…" else r"[\d.,]+" for part in parts[1::2])
        pattern = "".join(parts)
        assert re.search(f"^{pattern}$", printed, re.MULTILINE), (line, printed)
