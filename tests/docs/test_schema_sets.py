"""The checked-in schema sets: the newest is that of the code, and neighbors of one MAJOR work together."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from tests.helpers.hostile import Hostile
from tests.helpers.schema_peer import REFUSED, SchemaFilter
from turboserve import subjects
from turboserve.cli.reference.compatibility import incompatibilities
from turboserve.cli.reference.schemas import (
    LOGGED,
    SchemaSet,
    checked_in,
    file_of,
    messages,
    schema_set,
    text_of,
    write_new,
)
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.versions import MEMBER, SCHEMA_VERSION, SchemaVersion, stamped

DOCS = Path(__file__).parents[2] / "docs"
SETS = checked_in(DOCS)
REMEDY = "raise SCHEMA_VERSION in contracts/versions.py, and run `turboserve reference --update docs`"
OF_THIS_MAJOR = [version for version in SETS if version.major == SCHEMA_VERSION.major]
KINDS = {
    kind.__name__: kind for subject in messages().values() for listed in subject.values() for kind in listed
}
DOCUMENTS = 60
"""Number of documents that are made up of each type."""
READ = 10 if settings().derandomize else DOCUMENTS
"""Number of them after which a type is read often enough. `make soak` reads all of them."""
NOT_ON_THE_BUS = {"PoolFenced", "PoolRange", "TermFenced"}
"""Base classes whose fields only other contracts have."""


@cache
def of_the_code() -> SchemaSet:
    """Return the schema set of this code, which takes half a second to make. Nothing changes it."""
    return schema_set()


def test_the_newest_set_is_that_of_the_code() -> None:
    assert max(SETS) == SCHEMA_VERSION, REMEDY
    assert SETS[SCHEMA_VERSION] == schema_set(), REMEDY
    assert file_of(SCHEMA_VERSION, DOCS).read_text() == text_of(schema_set())


def test_minors_are_counted_without_a_gap() -> None:
    for major in {version.major for version in SETS}:
        minors = [version.minor for version in SETS if version.major == major]
        assert minors == list(range(len(minors)))
    assert all(schemas["version"] == str(version) for version, schemas in SETS.items())


@pytest.mark.parametrize(("old", "new"), list(pairwise(SETS)), ids=str)
def test_neighbors_of_one_major_work_together(old: SchemaVersion, new: SchemaVersion) -> None:
    found = incompatibilities(SETS[old], SETS[new])
    assert not found or old.major != new.major, f"{old} → {new} needs another MAJOR: {found}"
    assert SETS[old] != SETS[new]


@pytest.mark.parametrize("version", SETS, ids=str)
def test_every_set_is_valid_json_schema(version: SchemaVersion) -> None:
    definitions = SETS[version]["$defs"]
    for schema in definitions.values():
        Draft202012Validator.check_schema(schema)
    parts = [part for subject in SETS[version]["messages"].values() for part in subject.values()]
    assert {name for part in parts for name in part} <= set(definitions)


def test_a_set_has_every_message() -> None:
    assert set(LOGGED) == set(subjects.LOGS)
    definitions = of_the_code()["$defs"]
    kinds = [Contract]
    for kind in kinds:
        kinds += kind.__subclasses__()
    missing = {
        kind.__name__
        for kind in kinds[1:]
        if kind.__module__.startswith("turboserve.contracts.") and not kind.__name__.startswith("_")
    } - set(definitions)
    assert missing == NOT_ON_THE_BUS


def test_fields_called_as_prose_stay_in_a_set() -> None:
    assert "reason" in of_the_code()["$defs"]["Decision"]["properties"]
    for schema in of_the_code()["$defs"].values():
        assert "title" not in schema


# What the rules allow


Change = Callable[[dict[str, Any]], None]


def fields(schemas: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = schemas["$defs"][name]["properties"]
    return found


def add(name: str, field: str, schema: dict[str, Any], *, required: bool = False) -> Change:
    def change(schemas: dict[str, Any]) -> None:
        fields(schemas, name)[field] = schema
        if required:
            schemas["$defs"][name].setdefault("required", []).append(field)

    return change


def remove(name: str, field: str) -> Change:
    def change(schemas: dict[str, Any]) -> None:
        del fields(schemas, name)[field]
        required = schemas["$defs"][name].get("required", [])
        if field in required:
            required.remove(field)

    return change


def alter(name: str, field: str, **members: Any) -> Change:
    return lambda schemas: fields(schemas, name)[field].update(members)


def members(name: str, change: Callable[[list[str]], Any]) -> Change:
    return lambda schemas: change(schemas["$defs"][name]["enum"])


def without(subject: str) -> Change:
    return lambda schemas: schemas["messages"].pop(subject)


def new_event(schemas: dict[str, Any]) -> None:
    event = copy.deepcopy(schemas["$defs"]["SessionEnded"])
    event["properties"]["type"] = {"const": "session.sung", "default": "session.sung", "type": "string"}
    schemas["$defs"]["SessionSung"] = event
    schemas["messages"]["event.{id}"]["entry"].append("SessionSung")


def no_event(schemas: dict[str, Any]) -> None:
    schemas["messages"]["event.{id}"]["entry"].remove("SessionEnded")


def new_subject(schemas: dict[str, Any]) -> None:
    schemas["messages"]["state.session.sing"] = {"request": ["SessionRef"], "answer": ["Done"]}


def other_class_name(schemas: dict[str, Any]) -> None:
    schemas["$defs"]["Finished"] = schemas["$defs"].pop("Done")
    for parts in schemas["messages"].values():
        for listed in parts.values():
            listed[:] = ["Finished" if name == "Done" else name for name in listed]


TEXT = {"type": "string", "maxLength": 64}
OPTIONAL = {"anyOf": [TEXT, {"type": "null"}], "default": None}
COMPATIBLE = {
    "a field with a default is added": add("LoadReport", "mood", OPTIONAL),
    "and in a nested object": add("HeldSession", "mood", {**TEXT, "default": ""}),
    "a field with a default is removed": remove("LoadReport", "host"),
    "a type of event is added": new_event,
    "a subject is added": new_subject,
    "a class has another name": other_class_name,
    "an enumeration has another order": members("Phase", list.reverse),
}
INCOMPATIBLE = {
    "a required field is added": (add("LoadReport", "mood", TEXT, required=True), "added without a default"),
    "a required field is removed": (remove("LoadReport", "worker"), "removed, and old readers require it"),
    "and in a nested object": (remove("HeldSession", "epoch"), "HeldSession.epoch: removed"),
    "a field has another type": (alter("Ownership", "epoch", type="string"), "integer became string"),
    "a bound is narrowed": (alter("Playhead", "playhead_s", maximum=5), "Playhead.playhead_s"),
    "a bound is widened": (alter("Playhead", "playhead_s", maximum=1e12), "became 1000000000000.0"),
    "a bound is added": (alter("LoadReport", "sessions", maxItems=4), "maxItems added"),
    "a default is changed": (alter("LoadReport", "device", default="gpu"), "cpu became gpu"),
    "a required field gets a default": (alter("Ownership", "epoch", default=0), "default added"),
    "a member is added": (members("Phase", lambda one: one.append("asleep")), "old readers refuse it"),
    "a member is removed": (members("WorkerPhase", lambda one: one.remove("gone")), "new readers refuse it"),
    "an inline member is added": (
        lambda schemas: fields(schemas, "OrderPool")["change"]["items"]["enum"].append("mood"),
        "'mood' added",
    ),
    "a type of event is removed": (no_event, "type session.ended removed"),
    "a subject is removed": (without("state.worker.renew"), "state.worker.renew: removed"),
    "a limit in Python is changed": (lambda schemas: schemas["limits"].update(text=5), "limit text"),
    "a field may be null": (
        lambda schemas: fields(schemas, "Ownership").update(
            epoch={"anyOf": [fields(schemas, "Ownership")["epoch"], {"type": "null"}]}
        ),
        "anyOf added",
    ),
}


@pytest.mark.parametrize("change", COMPATIBLE.values(), ids=COMPATIBLE)
def test_a_minor_may_contain_it(change: Change) -> None:
    old = of_the_code()
    new = copy.deepcopy(dict(old))
    change(new)
    assert new != old
    assert incompatibilities(old, new) == []


@pytest.mark.parametrize(("change", "reason"), INCOMPATIBLE.values(), ids=INCOMPATIBLE)
def test_it_needs_another_major(change: Change, reason: str) -> None:
    old = of_the_code()
    new = copy.deepcopy(dict(old))
    change(new)
    found = incompatibilities(old, new)
    assert found
    assert any(reason in one for one in found), found


# What readers do


def documents(version: SchemaVersion, name: str, examples: int) -> Iterator[dict[str, Any]]:
    """Yield messages that a sender of this version may write."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": SETS[version]["$defs"]}
    valid = Draft202012Validator(schema)
    found = (Hostile(seed).document(schema) for seed in range(examples))
    return (one for one in found if valid.is_valid(one))


def test_made_up_lists_have_the_entries_that_their_schema_requires() -> None:
    lists = {"type": "array", "items": {"type": "boolean"}}
    for bounds, lengths in (({}, {0, 1, 2}), ({"minItems": 1}, {1, 2}), ({"minItems": 3}, {3})):
        assert {len(Hostile(seed).document({**lists, **bounds})) for seed in range(100)} == lengths


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("version", "name"),
    [(version, name) for version in OF_THIS_MAJOR for name in sorted(KINDS.keys() & SETS[version]["$defs"])],
    ids=str,
)
def test_the_code_reads_every_minor_and_every_minor_reads_the_code(version: SchemaVersion, name: str) -> None:
    kind, read = KINDS[name], 0
    valid = Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SETS[version]["$defs"]})
    for document in documents(version, name, DOCUMENTS):
        body = stamped(json.dumps(document, separators=(",", ":"))).replace(
            str(SCHEMA_VERSION), str(version), 1
        )
        try:
            message = kind.from_text(body)
        except InvalidInputError:
            continue
        except ValidationError as error:
            # No JSON Schema shows what validators in Python refuse, nor the type of a mapping's keys, nor
            # that a value of any type has no lone surrogate.
            refusals = [(one["type"], *one["loc"][-1:]) for one in error.errors()]
            if all(one[0] in ("value_error", "json_invalid") or one[-1] == "[key]" for one in refusals):
                continue
            raise
        read += 1
        written = json.loads(message.to_text())
        assert written.pop(MEMBER) == str(SCHEMA_VERSION)
        valid.validate(written)
        if read == READ:
            break
    # Their fields have validators in Python that random documents hardly pass.
    rare = ("OrderPool", "PoolOrders", "PoolStatus", "WeightHolders", "WeightKey")
    assert read or name in rare, name


# The filter that makes processes of an older version


def peer(schemas: Any) -> tuple[SchemaFilter, list[str]]:
    reports: list[str] = []
    return SchemaFilter(schemas, reports.append), reports


def test_a_peer_of_an_older_set_neither_sends_nor_reads_a_newer_field() -> None:
    old = copy.deepcopy(dict(of_the_code()))
    remove("HeldSession", "lead_s")(old)
    remove("LoadReport", "host")(old)
    held = {"session": "s", "epoch": 1, "next_chunk": 2, "lead_s": 3.0}
    load = {"worker": "w", "model": "m", "capacity": 1, "host": "near", "sessions": [held]}
    filtered, reports = peer({**old, "version": "1.77"})
    found = json.loads(filtered.text("load.{id}", "message", json.dumps({MEMBER: "1.78", **load})))
    assert found == {
        MEMBER: "1.77",
        "worker": "w",
        "model": "m",
        "capacity": 1,
        "sessions": [{"session": "s", "epoch": 1, "next_chunk": 2}],
    }
    assert reports == []


def test_a_peer_reports_what_its_readers_would_refuse() -> None:
    filtered, reports = peer(of_the_code())
    filtered.text("own.{id}", "entry", '{"session": "s", "epoch": "one"}')
    [report] = reports
    assert report.startswith(f"{REFUSED} own.{{id}} entry Ownership: $.epoch:")
    assert json.loads(filtered.text("event.{id}", "entry", '{"type": "session.sung"}'))["type"] == "unknown"


def test_a_new_set_is_written_once_and_never_changed(tmp_path: Path) -> None:
    assert write_new(tmp_path) == file_of(SCHEMA_VERSION, tmp_path)
    assert write_new(tmp_path) is None
    copied = shutil.copytree(DOCS / "reference" / "schemas", tmp_path / "copy" / "reference" / "schemas")
    assert write_new(tmp_path / "copy") is None
    file = copied / f"{SCHEMA_VERSION}.json"
    schemas = json.loads(file.read_text())
    remove("LoadReport", "host")(schemas)
    file.write_text(text_of(schemas))
    with pytest.raises(ValueError, match="Raise SCHEMA_VERSION"):
        write_new(tmp_path / "copy")
    assert json.loads(file.read_text()) == schemas


@pytest.mark.parametrize("name", ["x.json", "1.json", "1.0.0.json"])
def test_a_set_needs_a_version_as_its_name(tmp_path: Path, name: str) -> None:
    file = tmp_path / "reference" / "schemas" / name
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"not MAJOR\.MINOR\.json"):
        checked_in(tmp_path)
