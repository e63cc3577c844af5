"""Every example of a document runs, or has a reason and can be read: the CLI takes its options, and so on."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from typer._click.exceptions import ClickException

from tests.helpers.document_examples import DOCUMENTS as WITH_EXAMPLES
from tests.helpers.document_examples import NOT_RUN, ON_THE_STACK, WITH_KEYS, examples
from turboserve.bench import registry
from turboserve.cli.bench import command
from turboserve.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
API = json.loads((ROOT / "docs/reference/openapi.json").read_text())["paths"]
TARGETS = {
    target
    for file in (ROOT / "Makefile", *(ROOT / "deploy").glob("*.mk"))
    for target in re.findall(r"^([\w-]+):", file.read_text(), re.MULTILINE)
}


RUNNING = {
    (each.document, " ".join(each.text.split()))
    for document in WITH_EXAMPLES
    for each in examples(document)
    if each.reason_not_run is None
}
"""Examples that tests run as shown."""


def test_every_example_runs_or_has_a_reason() -> None:
    assert {document for document, _ in RUNNING} == {*ON_THE_STACK, *WITH_KEYS}


def test_every_reason_has_its_example_and_its_test() -> None:
    stale = [
        (document, start)
        for document, reasons in NOT_RUN.items()
        for start in reasons
        if not any(each.text.startswith(start) for each in examples(document))
    ]
    assert not stale
    named = {
        file
        for reasons in NOT_RUN.values()
        for reason in reasons.values()
        for file in re.findall(r"[\w/.-]+\.(?:py|md)\b", reason)
    }
    assert "tests/gateway/test_gateway_whep_example.py" in named
    assert not [file for file in named if not (ROOT / file).is_file()]


@dataclass(frozen=True)
class Shown:
    document: str
    line: str

    def __str__(self) -> str:
        return f"{self.document}: {self.line[:60]}"


def blocks(*kinds: str) -> list[tuple[str, str, str]]:
    """Return document, kind and text of each code block."""
    return [
        (str(file.relative_to(ROOT)), kind, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
        for file in DOCUMENTS
        for indent, kind, text in BLOCK.findall(file.read_text())
        if not kinds or kind in kinds
    ]


def commands(program: str) -> list[Shown]:
    """Return the commands of one program in console blocks that do not run, each as one line."""
    found = []
    for document, kind, text in blocks("console", "sh"):
        whole = text.replace("\\\n", " ")
        lines = whole.splitlines() if kind == "sh" else re.findall(r"^\$ (.+)$", whole, re.MULTILINE)
        found += [Shown(document, line) for line in lines]
    return [
        one
        for one in found
        if re.match(rf"(?:\S+=\S+ )*(?:\.venv/bin/)?{program}\b", one.line)
        and (one.document, " ".join(one.line.split())) not in RUNNING
    ]


def words_of(line: str) -> list[str]:
    """Return the words of a command, without its comment, its redirection and what is before the program."""
    words = shlex.split(line, comments=True)
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    ends = [number for number, word in enumerate(words) if word in {">", "|", "&&", ";"}]
    return words[1 : ends[0] if ends else None]


@cache
def root() -> Any:
    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Parse a command of `turboserve` as the CLI does, and run nothing. Raises what click raises."""
    current, name = root(), "turboserve"
    context = current.make_context(name, [], resilient_parsing=True)
    while hasattr(current, "commands"):
        name, words = words[0], words[1:]
        found = current.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        current, context = found, found.make_context(name, [], parent=context, resilient_parsing=True)
    if name == "bench" and words and not words[0].startswith("-"):
        module = registry.find(words[0]).load()
        one = typer.Typer(add_completion=False)
        one.command()(command(words[0], module.run, None))
        current, words = typer.main.get_command(one), words[1:]
    # A file that the reader has is not here.
    for parameter in current.params:
        kind: Any = getattr(parameter, "type", None)
        if getattr(kind, "exists", False):
            kind.exists = False
    current.make_context(name, words).close()


@pytest.mark.parametrize("shown", commands("turboserve"), ids=str)
def test_the_command_is_one_that_the_cli_takes(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    # The reader has set this before.
    monkeypatch.setenv("TURBOSERVE_URL", "http://127.0.0.1:8080")
    parse(["1" if word == "N" else word for word in words_of(shown.line)])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("turboserve bench stream --sesions 4", "sesions"),
        ("turboserve strat", "strat"),
        ("turboserve bench stream --sessions many", "integer"),
        ("turboserve session prompt --url http://127.0.0.1", "session"),
    ],
)
def test_a_command_that_the_cli_does_not_take_is_found(line: str, said: str) -> None:
    with pytest.raises((AssertionError, ClickException), match=said):
        parse(words_of(line))


@pytest.mark.parametrize("shown", commands("curl"), ids=str)
def test_the_request_is_one_that_the_api_has(shown: Shown) -> None:
    words = words_of(shown.line)
    [address] = [word for word in words if "localhost:8080" in word]
    path = urlsplit(address if "//" in address else f"http://{address}").path
    body = any(word in {"-d", "--data", "--json"} for word in words)
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if body else "GET"
    routes = [route for route in API if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route), path)]
    assert any(method.lower() in API[route] for route in routes), (method, path)
    for number, word in enumerate(words):
        if word == "-d" and not words[number + 1].startswith("@"):
            json.loads(words[number + 1])


@pytest.mark.parametrize("shown", commands("make"), ids=str)
def test_the_target_is_one_that_make_has(shown: Shown) -> None:
    assert set(words_of(shown.line)) <= TARGETS


@pytest.mark.parametrize("shown", [*commands("python"), *commands("docker"), *commands("pip")], ids=str)
def test_the_files_that_a_command_names_exist(shown: Shown) -> None:
    # What the page itself has the reader write is beside it.
    paths = [word.split("[")[0] for word in words_of(shown.line) if "/" in word or word.endswith(".py")]
    missing = [path for path in paths if not (ROOT / path).exists() and path != "./minimal-model"]
    assert not missing


def read_json(text: str) -> None:
    """Read one value, or a member of an object."""
    json.loads(f"{{{text}}}" if re.match(r'"\w+":', text) else text)


READERS: dict[str, Callable[[str], object]] = {
    "json": read_json,
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
}


@pytest.mark.parametrize(
    ("document", "kind", "text"), blocks(*READERS), ids=lambda value: value[:40] if "\n" not in value else ""
)
def test_an_example_can_be_read(document: str, kind: str, text: str) -> None:
    READERS[kind](text.replace("…", "..."))


@pytest.mark.parametrize(
    ("document", "kind", "text"), blocks("python"), ids=lambda value: value[:40] if "\n" not in value else ""
)
def test_an_example_is_python(document: str, kind: str, text: str) -> None:
    compile(text, document, "exec", flags=0x2000)  # `await` outside of a function, as in the examples.
