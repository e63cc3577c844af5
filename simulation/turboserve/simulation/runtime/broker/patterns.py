"""Finds the subject patterns that match a subject."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from turboserve.simulation.runtime.broker.messages import INBOX_PREFIX

T = TypeVar("T")

ANSWERS_KEPT = 20_000


class PatternIndex(Generic[T]):
    """Values by subject pattern, in the order in which they were added.

    A dictionary finds patterns whose only wildcard is their last token, which are nearly all.
    """

    def __init__(self) -> None:
        self._exact: dict[str, dict[T, None]] = {}
        self._star: dict[str, dict[T, None]] = {}
        """Patterns that end in `.*`, by the part before it."""
        self._tail: dict[str, dict[T, None]] = {}
        """Patterns that end in `.>`, by the part before it."""
        self._rest: dict[str, dict[T, list[str]]] = {}
        """Patterns with other wildcards, by first token and value: the pattern's tokens."""
        self._found: dict[str, list[T]] = {}
        """Results since the last change that concerns them, by subject."""
        self._found_below: dict[str, list[T]] = {}
        """Such results for inbox subjects, by the part before the last token."""
        self._subjects: dict[str, dict[str, None]] = {}
        """Subjects in `_found`, by the part before the last token."""

    def add(self, pattern: str, value: T) -> None:
        place = self._changed(pattern)
        if place is None:
            tokens = pattern.split(".")
            self._rest.setdefault(tokens[0], {})[value] = tokens
        else:
            place[0].setdefault(place[1], {})[value] = None

    def remove(self, pattern: str, value: T) -> None:
        place = self._changed(pattern)
        if place is None:
            first, _, _ = pattern.partition(".")
            self._rest.get(first, {}).pop(value, None)
            return
        values = place[0].get(place[1])
        if values is not None:
            values.pop(value, None)
            if not values:
                del place[0][place[1]]

    def match(self, subject: str) -> list[T]:
        """Return the values whose patterns match. The caller must not change the list."""
        if subject.startswith(INBOX_PREFIX):
            return self._match_inbox(subject)
        if (known := self._found.get(subject)) is not None:
            return known
        return self._cached(subject)

    def _cached(self, subject: str) -> list[T]:
        found = self._match(subject)
        if len(self._found) < ANSWERS_KEPT:
            self._found[subject] = found
            self._subjects.setdefault(subject.rpartition(".")[0], {})[subject] = None
        return found

    def _match_inbox(self, subject: str) -> list[T]:
        """Return the matches of an inbox subject, which is used for one answer only."""
        if subject in self._exact:
            # Of a subscription that takes many messages.
            known = self._found.get(subject)
            return self._cached(subject) if known is None else known
        parent = subject.rpartition(".")[0]
        found = self._found_below.get(parent)
        if found is None:
            found = self._match(subject)
            first, _, _ = subject.partition(".")
            # Without these patterns, the last token decides nothing.
            if self._rest.keys().isdisjoint((first, "*", ">")):
                self._found_below[parent] = found
        return found

    def _match(self, subject: str) -> list[T]:
        found: list[T] = []
        if (values := self._exact.get(subject)) is not None:
            found += values
        parent, dot, _ = subject.rpartition(".")
        if dot and (values := self._star.get(parent)) is not None:
            found += values
        if self._tail:
            end = subject.find(".")
            while end >= 0:
                if (values := self._tail.get(subject[:end])) is not None:
                    found += values
                end = subject.find(".", end + 1)
        if self._rest:
            tokens = subject.split(".")
            for first in (tokens[0], "*", ">"):
                if (patterns := self._rest.get(first)) is not None:
                    found += [value for value, pattern in patterns.items() if _matches(pattern, tokens)]
        return found

    def _changed(self, pattern: str) -> tuple[dict[str, dict[T, None]], str] | None:
        """Drop the results that a change of the pattern concerns. Returns the pattern's place."""
        place = self._place(pattern)
        if place is None or place[0] is self._tail:
            self._found.clear()
            self._found_below.clear()
            self._subjects.clear()
        elif place[0] is self._star:
            self._found_below.pop(place[1], None)
            for subject in self._subjects.pop(place[1], ()):
                self._found.pop(subject, None)
        elif self._found.pop(pattern, None) is not None:
            above = pattern.rpartition(".")[0]
            below = self._subjects[above]
            del below[pattern]
            if not below:
                del self._subjects[above]
        return place

    def _place(self, pattern: str) -> tuple[dict[str, dict[T, None]], str] | None:
        parent, dot, last = pattern.rpartition(".")
        if dot and last in ("*", ">") and not has_wildcard(parent):
            return (self._star if last == "*" else self._tail), parent
        return None if has_wildcard(pattern) else (self._exact, pattern)


def has_wildcard(pattern: str) -> bool:
    if "*" not in pattern and ">" not in pattern:
        return False
    return any(token in ("*", ">") for token in pattern.split("."))


def matches(pattern: str, subject: str) -> bool:
    """Return whether `pattern` matches `subject`."""
    return pattern == subject or _matches(pattern.split("."), subject.split("."))


def overlap(first: str, second: str) -> bool:
    """Return whether a subject can match both patterns."""
    a, b = first.split("."), second.split(".")
    for left, right in zip(a, b, strict=False):
        if ">" in (left, right):
            return True
        if left != right and "*" not in (left, right):
            return False
    return len(a) == len(b)


def wildcards(pattern: str, subject: str) -> list[str]:
    """Return the tokens of a matching subject at the places of the pattern's `*`."""
    pairs: Iterator[tuple[str, str]] = zip(pattern.split("."), subject.split("."), strict=False)
    return [token for name, token in pairs if name == "*"]


def _matches(pattern: list[str], tokens: list[str]) -> bool:
    for index, name in enumerate(pattern):
        if name == ">":
            return len(tokens) > index
        if index >= len(tokens) or (name not in ("*", tokens[index])):
            return False
    return len(pattern) == len(tokens)
