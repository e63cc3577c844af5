"""Compares two schema sets: may processes of both run at the same time?

In a rolling upgrade, each side reads what the other one writes. Both directions allow a change only if:

- a reader finds every field that it requires, and ignores the fields that it does not know;
- a field that both sets have accepts the same values, so neither side writes what the other one refuses.

`incompatibilities` therefore compares fields for equality. A field may only appear or disappear if it has a
default. An enumeration may not change: its old readers refuse a new member. Subjects and types of events may
be added, and not removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turboserve.cli.reference.schemas import SchemaSet

Pair = tuple[str, str]


def incompatibilities(old: SchemaSet, new: SchemaSet) -> list[str]:
    """Return what prevents processes of both sets from working together; empty if nothing does."""
    comparison = _Comparison(old, new)
    return sorted(set(comparison.sets()))


class _Comparison:
    def __init__(self, old: SchemaSet, new: SchemaSet) -> None:
        self._old, self._new = old, new
        self._seen: set[Pair] = set()

    def sets(self) -> Iterator[str]:
        for name, limit in self._old["limits"].items():
            if self._new["limits"].get(name) != limit:
                yield f"limit {name}: {limit} became {self._new['limits'].get(name)}"
        for subject, parts in self._old["messages"].items():
            if subject not in self._new["messages"]:
                yield f"{subject}: removed"
                continue
            for part, names in parts.items():
                yield from self._messages(
                    f"{subject} {part}", names, self._new["messages"][subject].get(part)
                )

    def _messages(self, where: str, old: list[str], new: list[str] | None) -> Iterator[str]:
        """Compare the messages of one kind. The member `type` distinguishes several contracts."""
        if new is None:
            yield f"{where}: removed"
            return
        olds = {_type_of(self._old["$defs"][name]): name for name in old}
        news = {_type_of(self._new["$defs"][name]): name for name in new}
        for kind, name in olds.items():
            if kind not in news:
                yield f"{where}: type {kind} removed"
            else:
                yield from self._objects(name, news[kind])

    def _objects(self, old_name: str, new_name: str) -> Iterator[str]:
        """Compare two definitions."""
        if (old_name, new_name) in self._seen:
            return
        self._seen.add((old_name, new_name))
        old, new = self._old["$defs"][old_name], self._new["$defs"][new_name]
        if "properties" not in old or "properties" not in new:
            yield from self._values(old_name, old, new)
            return
        fields, added = old["properties"], new["properties"]
        required, required_now = set(old.get("required", ())), set(new.get("required", ()))
        for name in sorted({*fields, *added}):
            where = f"{old_name}.{name}"
            if name not in added:
                if name in required:
                    yield f"{where}: removed, and old readers require it"
            elif name not in fields:
                if name in required_now:
                    yield f"{where}: added without a default, and old senders do not write it"
            else:
                if (name in required) != (name in required_now):
                    yield f"{where}: {'has a default now' if name in required else 'has no default any more'}"
                yield from self._values(where, fields[name], added[name])
        yield from self._values(old_name, _without_fields(old), _without_fields(new))

    def _values(self, where: str, old: Any, new: Any) -> Iterator[str]:
        """Compare two schemas of values."""
        if isinstance(old, dict) and isinstance(new, dict):
            if "$ref" in old and "$ref" in new:
                yield from self._objects(_name(old), _name(new))
            for member in sorted({*old, *new} - {"$ref"}):
                if member not in old or member not in new:
                    yield f"{where}: {member} {'added' if member in new else 'removed'}"
                elif member == "enum":
                    yield from _members(where, old[member], new[member])
                else:
                    yield from self._values(where, old[member], new[member])
            if ("$ref" in old) != ("$ref" in new):
                yield f"{where}: another type"
        elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for one, other in zip(old, new, strict=True):
                yield from self._values(where, one, other)
        elif old != new or type(old) is not type(new):
            yield f"{where}: {old} became {new}"


def _members(where: str, old: list[Any], new: list[Any]) -> Iterator[str]:
    """Compare the members of an enumeration, whose order does not matter."""
    for member in old:
        if member not in new:
            yield f"{where}: member {member!r} removed, and new readers refuse it"
    for member in new:
        if member not in old:
            yield f"{where}: member {member!r} added, and old readers refuse it"


def _type_of(schema: Any) -> str | None:
    """Return the constant `type` of a message; None if it has none."""
    kind = schema.get("properties", {}).get("type", {}).get("const")
    return None if kind is None else str(kind)


def _without_fields(schema: Any) -> Any:
    return {name: value for name, value in schema.items() if name not in ("properties", "required")}


def _name(schema: Any) -> str:
    return str(schema["$ref"]).removeprefix("#/$defs/")
