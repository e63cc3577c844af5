"""A process of an earlier schema version: a service whose messages all pass through a checked-in schema set.

`python schema_peer.py SET MODULE` runs the service MODULE with the schema set in the file SET:

- What the service sends loses the fields that the set does not have, and carries the set's version.
- What the service receives has to be valid by the set. It loses the other fields too, so that the service
  knows nothing else. Types of events that the set does not have become unreadable.

The service then behaves on the bus as code of that version: it can neither use nor answer anything newer.
A message that a reader of that version would refuse is reported as a line with `REFUSED`.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import nats
from jsonschema import Draft202012Validator
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from turboserve.bus import Bus

REFUSED = "schema peer refused"
META, CHUNK, ERROR = "Ts-Meta", "Ts-Chunk", "Ts-Error"
VERSION = "schema_version"
Headers = Mapping[str, str]


class SchemaFilter:
    """Passes messages through one schema set."""

    def __init__(self, schemas: Mapping[str, Any], report: Callable[[str], None]) -> None:
        self._version: str = schemas["version"]
        self._defs: dict[str, Any] = schemas["$defs"]
        self._messages: dict[str, dict[str, list[str]]] = schemas["messages"]
        self._report = report
        self.passed: dict[str, int] = {}
        """Number of messages by subject and part."""

    def subject_of(self, subject: str) -> str | None:
        """Return the subject's name in the set. None: the set does not have it, such as the broker's own."""
        subject = subject.removeprefix("live.").partition(".from.")[0]
        for name in self._messages:
            prefix, placeholder, _ = name.partition("{id}")
            if subject == name or (placeholder and subject.startswith(prefix)):
                return name
        return None

    def text(self, subject: str, part: str, text: str | bytes) -> str:
        """Return a message as a process of this version reads or writes it."""
        try:
            document = json.loads(text)
        except ValueError:
            self._report(f"{REFUSED} {subject} {part}: no JSON: {text!r:.200}")
            return text if isinstance(text, str) else text.decode("latin-1")
        names = self._messages[subject][part]
        name = names[0] if len(names) == 1 else self._by_type(names, document.get("type"))
        if name is None:
            return json.dumps({VERSION: self._version, "type": "unknown"})
        schema = {"$ref": f"#/$defs/{name}", "$defs": self._defs}
        for error in Draft202012Validator(schema).iter_errors(document):
            self._report(f"{REFUSED} {subject} {part} {name}: {error.json_path}: {error.message:.300}")
        found = self._known({"$ref": f"#/$defs/{name}"}, document)
        key = f"{subject} {part}"
        self.passed[key] = self.passed.get(key, 0) + 1
        return json.dumps({VERSION: self._version, **found}, separators=(",", ":"))

    def _by_type(self, names: list[str], kind: object) -> str | None:
        types: dict[object, str] = {self._defs[name]["properties"]["type"]["const"]: name for name in names}
        return types.get(kind)

    def _known(self, schema: Any, value: Any) -> Any:
        """Return `value` without the members that `schema` does not have."""
        if "$ref" in schema:
            schema = self._defs[schema["$ref"].rpartition("/")[2]]
        for choice in schema.get("anyOf", ()):
            full = {**choice, "$defs": self._defs}
            if Draft202012Validator(full).is_valid(value):
                return self._known(choice, value)
        if isinstance(value, dict) and "properties" in schema:
            fields = schema["properties"]
            return {name: self._known(fields[name], one) for name, one in value.items() if name in fields}
        if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
            inner = schema["additionalProperties"]
            return {name: self._known(inner, one) for name, one in value.items()}
        if isinstance(value, list) and "items" in schema:
            return [self._known(schema["items"], one) for one in value]
        return value

    def message(
        self, subject: str, part: str, data: bytes, headers: Headers | None
    ) -> tuple[bytes, dict[str, str] | None]:
        """Return body and headers of a message of the set's `subject`."""
        if headers is not None:
            headers = dict(headers)
        if headers and ERROR in headers:
            headers[ERROR] = self.text("error", "answer", headers[ERROR])
        elif headers and CHUNK in headers:
            headers[CHUNK] = self.text(subject, part, headers[CHUNK])
        elif headers and META in headers:
            headers[META] = self.text(subject, part, headers[META])
        elif data:
            data = self.text(subject, part, data).encode()
        return data, headers


class FilteredClient:
    """A broker's client whose messages pass through `filter`."""

    def __init__(self, client: Any, messages: SchemaFilter) -> None:
        self._client, self._filter = client, messages
        self._asked: dict[str, str] = {}
        """Reply subject → subject of the request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        if subject in self._asked:
            payload, headers = self._filter.message(self._asked.pop(subject), "answer", payload, headers)
        elif (known := self._filter.subject_of(subject)) is not None:
            payload, headers = self._filter.message(known, "message", payload, headers)
        await self._client.publish(subject, payload, reply, headers)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        known = self._filter.subject_of(subject)
        is_call = ".from." in subject
        if known is not None:
            part = "request" if is_call else "entry"
            payload, headers = self._filter.message(known, part, payload, headers)
        answer: Msg = await self._client.request(subject, payload, timeout, old_style, headers)
        if known is not None and is_call:
            answer.data, answer.headers = self._filter.message(known, "answer", answer.data, answer.headers)
        elif known is None:
            self._stored(answer)
        return answer

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None
    ) -> Subscription:
        async def receive(raw: Msg) -> None:
            assert cb is not None
            known = self._filter.subject_of(raw.subject)
            if known is None or raw.subject.startswith("live."):
                self._stored(raw)
            elif ".from." in raw.subject:
                self._asked[raw.reply] = known
                raw.data, raw.headers = self._filter.message(known, "request", raw.data, raw.headers)
            else:
                part = "entry" if self._is_log(known) else "message"
                raw.data, raw.headers = self._filter.message(known, part, raw.data, raw.headers)
            await cb(raw)

        found: Subscription = await self._client.subscribe(subject, queue, cb=None if cb is None else receive)
        return found

    def jetstream(self, *, timeout: float) -> JetStreamContext:
        return JetStreamContext(self, timeout=timeout)  # type: ignore[arg-type]

    def _is_log(self, known: str) -> bool:
        return "entry" in self._filter._messages[known]

    def _stored(self, raw: Msg) -> None:
        """Filter a message that came from a log, by direct get or republished."""
        subject = (raw.headers or {}).get("Nats-Subject")
        known = None if subject is None else self._filter.subject_of(subject)
        if known is not None:
            raw.data, raw.headers = self._filter.message(known, "entry", raw.data, raw.headers)


async def connect(file: str, *args: Any, **options: Any) -> FilteredClient:
    """As `nats.connect`, through the schema set in `file`."""
    schemas = json.loads(Path(file).read_text())
    client = await nats.connect(*args, **options)
    return FilteredClient(client, SchemaFilter(schemas, partial(print, file=sys.stderr, flush=True)))


def main() -> None:
    file, module = sys.argv[1:3]
    original = Bus.connect.__func__  # type: ignore[attr-defined]

    async def connect_bus(cls: type[Bus], name: str, settings: Any) -> Bus:
        bus: Bus = await original(cls, name, settings, partial(connect, file))
        return bus

    Bus.connect = classmethod(connect_bus)  # type: ignore[assignment, method-assign]
    sys.argv = [module]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
