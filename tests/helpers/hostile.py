"""Hostile input: values at and beyond every limit, documents with such values, and invalid bytes.

A seed determines all of it. Hypothesis draws the seeds: the same ones for the same commit, and new ones under
the profile `explore`. It draws nothing else, because its own strategies take a hundred times as long.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from turboserve.contracts.versions import MEMBER, SCHEMA_VERSION

Schema = Mapping[str, Any]

INTEGERS = (-1, 0, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**40, -(10**400))
NUMBERS = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308, -1.0)
TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "x\udfff\ud800",
    ".",
    "..",
    "*",
    ">",
    "a.b",
    "a b",
    "id\n",
    "\r\nTs-Error: {}",
    "\u202etxet",
    "'; drop table sessions; --",
    "../../etc/passwd",
    "%00",
    "🎬" * 700,
    "x" * 9_000,
)
DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
STRUCTURES: tuple[Any, ...] = (None, True, False, [], {}, [None], {"type": "ping"}, {"": {}}, DEEP)

NOT_DOCUMENTS = (
    b"",
    b"\0",
    b"null",
    b"true",
    b"[]",
    b"NaN",
    b'"text"',
    b"-",
    b"{",
    b"{}{}",
    b'{"a":1,}',
    b'\xef\xbb\xbf{"a":1}',
    b'{"a":"\xff\xfe"}',
    b'{"a":"\xed\xa0\x80"}',
    b'{"a":"\\ud800"}',
    b'{"a":1e999999}',
    b"\xff" * 64,
    '{"a":1}'.encode("utf-16"),
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b"9" * 50_000,
    b'{"' + b"k" * 100_000 + b'":1}',
)
"""Bytes that no reader of JSON objects accepts, or that exhaust the stack of a careless one."""


Names = Mapping[str, Sequence[Any]]
"""Values to choose from for members of these names, so that a document refers to existing things."""

_LETTERS = "abcXYZ019_-"
_CLASSES = {"0-9a-f": "0123456789abcdef", "a-z": "abcz"}
_SIMPLE = re.compile(r"\^\[(0-9a-f|a-z)\]\{(\d+)(?:,(\d+))?\}")
"""Beginning of a pattern that a text of one class of characters matches."""


class Hostile:
    """A source of hostile input, determined by `seed`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, like: Any = None) -> Any:
        """Return any hostile value, or one of the type of `like`."""
        kinds: tuple[Sequence[Any], ...] = (INTEGERS, NUMBERS, TEXTS, STRUCTURES)
        if isinstance(like, str):
            kinds = (TEXTS,)
        elif isinstance(like, int | float) and not isinstance(like, bool):
            kinds = (INTEGERS,) if isinstance(like, int) else (NUMBERS, INTEGERS)
        elif isinstance(like, list | dict):
            kinds = (STRUCTURES,)
        return copy.deepcopy(self.random.choice(self.random.choice(kinds)))

    def document(self, schema: Schema, names: Names | None = None) -> Any:
        """Return a document that `schema` (JSON Schema as pydantic writes it) mostly allows."""
        return self._of(schema, schema.get("$defs", {}), names or {}, 0)

    def mutated(self, document: Any, most: int = 3) -> Any:
        """Return `document` with up to `most` members replaced, removed or added, mostly by the same type."""
        changed = copy.deepcopy(document)
        for _ in range(self.random.randint(0, most)):
            holder, key = self.random.choice([(None, None), *_places(changed)])
            if holder is None:
                if isinstance(changed, dict):
                    changed[self.random.choice(("", "$ref", "__proto__", "id", "\0"))] = self.value()
            elif isinstance(holder, dict) and self.random.random() < 0.2:
                del holder[key]
            else:
                holder[key] = self.value(holder[key] if self.random.random() < 0.8 else None)
        return changed

    def versioned(self, document: Any) -> Any:
        """Return `document` with a schema version: mostly the current one, else a hostile value or none."""
        if not isinstance(document, dict) or self.random.random() < 0.02:
            return document
        version = str(SCHEMA_VERSION) if self.random.random() < 0.96 else self.value("")
        return {MEMBER: version, **document}

    def encoded(self, document: Any) -> bytes:
        """Encode `document` as JSON, sometimes cut, doubled, with a member twice, or in another encoding."""
        text = json.dumps(document)
        data = text.encode()
        at = self.random.randint(0, len(data))
        match self.random.randint(0, 19):
            case 0:
                return data[:at]
            case 1:
                return data + data
            case 2:
                return self.random.choice(NOT_DOCUMENTS)
            case 3 if isinstance(document, dict) and document:
                twice = json.dumps({self.random.choice(sorted(document)): self.value()})
                return f"{twice[:-1]}, {text[1:]}".encode()
            case 4:
                return text.encode(self.random.choice(("utf-16", "utf-32", "utf-8-sig")))
            case 5:
                return data[:at] + self.random.randbytes(self.random.randint(1, 8)) + data[at:]
        return data

    def _of(self, schema: Schema, defs: Mapping[str, Any], names: Names, depth: int) -> Any:
        if "$ref" in schema:
            return self._of(defs[schema["$ref"].rpartition("/")[2]], defs, names, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self._of(self.random.choice(schema[several]), defs, names, depth)
        match schema.get("type"):
            case "object":
                return self._object(schema, defs, names, depth)
            case "array":
                return self._array(schema, defs, names, depth)
            case "string" if found := _SIMPLE.match(schema.get("pattern", "")):
                least, most = int(found[2]), int(found[3] or found[2])
                return "".join(self.random.choices(_CLASSES[found[1]], k=self.random.randint(least, most)))
            case "string":
                least = schema.get("minLength", 0 if "pattern" not in schema else 1)
                length = self.random.randint(least, max(least, min(schema.get("maxLength", 20), 20)))
                return "".join(self.random.choice(_LETTERS) for _ in range(length))
            case "integer":
                return self.random.randint(
                    _least(schema), min(schema.get("maximum", 1_000), _least(schema) + 100)
                )
            case "number":
                most = min(schema.get("maximum", 1e6), 1e6)
                return self.random.choice((float(_least(schema)), self.random.uniform(_least(schema), most)))
            case "boolean":
                return self.random.random() < 0.5
            case "null":
                return None
        return self.value()

    def _object(self, schema: Schema, defs: Mapping[str, Any], names: Names, depth: int) -> Any:
        if "properties" not in schema:
            inside = schema.get("additionalProperties")
            keys = self.random.sample(("1", "2", "a", "rho"), self.random.randint(0, 2))
            return {
                key: self._of(inside if isinstance(inside, dict) else {}, defs, names, depth + 1)
                for key in keys
            }
        made = {}
        for name, member in schema["properties"].items():
            if name in names:
                made[name] = self.random.choice(names[name])
            elif name in schema.get("required", ()) or (depth < 4 and self.random.random() < 0.5):
                made[name] = self._of(member, defs, names, depth + 1)
        return made

    def _array(self, schema: Schema, defs: Mapping[str, Any], names: Names, depth: int) -> Any:
        if "prefixItems" in schema:
            return [self._of(one, defs, names, depth + 1) for one in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        length = self.random.randint(least, max(least, min(schema.get("maxItems", 2), 2)))
        return [self._of(schema.get("items", {}), defs, names, depth + 1) for _ in range(length)]


def attacks(examples: int) -> Callable[[Callable[[Hostile], None]], None]:
    """Decorate the body of a test. Calls it at once, `examples` times with different input."""

    def run(body: Callable[[Hostile], None]) -> None:
        # A smaller seed is no smaller input, so shrinking is of no use.
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, 2**64 - 1))
        def each(seed: int) -> None:
            body(Hostile(seed))

        each()

    return run


def _least(schema: Schema) -> Any:
    return max(schema.get("minimum", schema.get("exclusiveMinimum", -3)), -3)


def _places(document: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Return the members of the document's objects and lists, as (holder, key), down to a depth of 8."""
    found: list[tuple[Any, Any]] = []
    pairs: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        pairs = list(document.items())
    elif isinstance(document, list):
        pairs = list(enumerate(document[:4]))
    for key, value in pairs:
        found += [(document, key), *(_places(value, depth + 1) if depth < 8 else ())]
    return found[:200]
