"""Direct gets: one stored message, or several in one request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from turboserve.simulation.runtime.broker.formats import rfc3339
from turboserve.simulation.runtime.broker.messages import Message
from turboserve.simulation.runtime.broker.patterns import matches
from turboserve.simulation.runtime.broker.stream import Stored, Stream

Request = dict[str, Any]


def answers(stream: Stream, subject: str, message: Message) -> Iterator[Message]:
    """Answer a request on `$JS.API.DIRECT.GET.STREAM`, or `….SUBJECT` for the subject's newest message."""
    if subject:
        request: Request = {"last_by_subj": subject}
    elif not message.data:
        yield _status(message, "408", "Empty Request")
        return
    else:
        try:
            request = json.loads(message.data)
        except ValueError:
            yield _status(message, "408", "Malformed Request")
            return
    multiple = request.get("multi_last")
    if multiple:
        yield from _newest_of_each(stream, multiple, request, message)
        return
    if not any(request.get(key) for key in ("seq", "last_by_subj", "next_by_subj")):
        yield _status(message, "408", "Empty Request")
    elif request.get("last_by_subj") and (request.get("seq") or request.get("next_by_subj")):
        yield _status(message, "408", "Bad Request")
    elif request.get("batch"):
        yield from _batch(stream, request, message)
    elif (stored := find(stream, request)) is not None:
        yield Message(message.reply, stored.data, headers=stored_headers(stream, stored))
    else:
        yield _status(message, "404", "Message Not Found")


def find(stream: Stream, request: Request) -> Stored | None:
    """Find the one message that a request without a batch names."""
    if pattern := request.get("last_by_subj"):
        return stream.get(stream.newest_sequence(pattern))
    sequence = request.get("seq") or 1
    if pattern := request.get("next_by_subj"):
        found = stream.next_sequence(pattern, sequence)
        return None if found is None else stream.get(found)
    return stream.get(sequence)


def stored_headers(stream: Stream, stored: Stored) -> dict[str, str]:
    """Return the message's own headers and those that the server adds."""
    return {
        **stored.headers,
        "Nats-Stream": stream.name,
        "Nats-Subject": stored.subject,
        "Nats-Sequence": str(stored.sequence),
        "Nats-Time-Stamp": rfc3339(stored.time),
    }


def _batch(stream: Stream, request: Request, message: Message) -> Iterator[Message]:
    pattern = request.get("next_by_subj")
    start = request.get("seq") or 1
    if pattern and pattern != ">":
        pending = sum(
            1 for subject in stream.counts(pattern) for number in stream.sequences(subject) if number >= start
        )
        first = stream.next_sequence(pattern, start)
        chosen: Iterator[Stored] = (
            s for s in stream.from_sequence(first or start) if matches(pattern, s.subject)
        )
    else:
        chosen = stream.from_sequence(start)
        pending = stream.count_from(start)
    limit, max_bytes = int(request["batch"]), request.get("max_bytes") or 0
    found: list[Stored] = []
    size = 0
    for stored in chosen:
        found.append(stored)
        size += stored.size
        if len(found) == limit or 0 < max_bytes <= size:
            break
    if not found:
        yield _status(message, "404", "Message Not Found")
        return
    before = 0
    for stored in found:
        pending -= 1
        yield _batched(stream, stored, message, pending, before)
        before = stored.sequence
    yield _end(message, pending, before)


def _newest_of_each(
    stream: Stream, patterns: list[str], request: Request, message: Message
) -> Iterator[Message]:
    subjects = {subject for pattern in patterns for subject in stream.counts(pattern)}
    sequences = sorted(stream.newest_sequence(subject) for subject in subjects)
    if not sequences:
        yield _status(message, "404", "No Results")
        return
    limit = int(request.get("batch") or len(sequences))
    pending, before = len(sequences), 0
    for sequence in sequences[:limit]:
        stored = stream.get(sequence)
        assert stored is not None
        pending -= 1
        yield _batched(stream, stored, message, pending, before)
        before = sequence
    end = _end(message, pending, before)
    end.headers = {**(end.headers or {}), "Nats-UpTo-Sequence": str(stream.last_sequence)}
    yield end


def _batched(stream: Stream, stored: Stored, message: Message, pending: int, before: int) -> Message:
    headers = stored_headers(stream, stored)
    headers["Nats-Num-Pending"] = str(pending)
    headers["Nats-Last-Sequence"] = str(before)
    return Message(message.reply, stored.data, headers=headers)


def _end(message: Message, pending: int, before: int) -> Message:
    end = _status(message, "204", "EOB")
    end.headers = {
        **(end.headers or {}),
        "Nats-Num-Pending": str(pending),
        "Nats-Last-Sequence": str(before),
    }
    return end


def _status(message: Message, status: str, text: str) -> Message:
    return Message(message.reply, headers={"Status": status, "Description": text})
