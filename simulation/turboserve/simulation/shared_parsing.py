"""Messages are parsed once in a run: a parsed message is frozen, so that all its receivers share it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from turboserve.contracts.base import Contract

MESSAGES = 2_048
"""Newest messages whose parsed form is kept."""
HANDED_OVER = 256
"""Newest messages whose object is kept to be handed over. Nearly all are read when they are sent."""


@contextmanager
def shared_parsing(*, handed_over: bool = False) -> Iterator[None]:
    """Parse each body once for all processes of the run. Errors are raised to every receiver.

    `handed_over`: a message of this run is not parsed at all. Its receivers get the sender's object, which is
    frozen and was validated when it was made. The message's bytes are still what the servers see and count.
    """
    parse = Contract.__dict__["from_bytes"].__func__
    cached = functools.lru_cache(MESSAGES)(parse)

    def from_bytes(kind: type[Contract], data: bytes) -> Contract:
        return cached(kind, data)  # type: ignore[no-any-return]

    if not handed_over:
        with _replaced(from_bytes=classmethod(from_bytes)):
            yield
        return
    parse_text = Contract.__dict__["from_text"].__func__
    write = Contract.to_text
    sent = _Sent()

    def to_text(self: Contract) -> str:
        text = write(self)
        sent.add(type(self), text, self)
        return text

    def to_bytes(self: Contract) -> bytes:
        data = write(self).encode()
        sent.add(type(self), data, self)
        return data

    def from_text(kind: type[Contract], text: str) -> Contract:
        return sent.get(kind, text) or parse_text(kind, text)

    def known_or_parsed(kind: type[Contract], data: bytes) -> Contract:
        return sent.get(kind, data) or cached(kind, data)

    with _replaced(
        to_text=to_text,
        to_bytes=to_bytes,
        from_text=classmethod(from_text),
        from_bytes=classmethod(known_or_parsed),
    ):
        yield


class _Sent:
    """The newest messages by type and text: between `HANDED_OVER` and twice as many."""

    def __init__(self) -> None:
        self._new: dict[tuple[type[Contract], str | bytes], Contract] = {}
        self._old = self._new

    def add(self, kind: type[Contract], text: str | bytes, message: Contract) -> None:
        if len(self._new) >= HANDED_OVER:
            self._old, self._new = self._new, {}
        self._new[kind, text] = message

    def get(self, kind: type[Contract], text: str | bytes) -> Contract | None:
        key = kind, text
        return self._new.get(key) or self._old.get(key)


@contextmanager
def _replaced(**methods: Any) -> Iterator[None]:
    """Replace methods of all messages during the block."""
    before = {name: Contract.__dict__[name] for name in methods}
    for name, method in methods.items():
        setattr(Contract, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Contract, name, method)
