"""Pages of usage. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.usage import BY_DAY, UsageDay, UsageDimension, UsageGroup, UsagePage

_NAME = "[A-Za-z0-9_-]{0,64}"
_TEXT = re.compile(rf"([0-9]{{1,7}})\.({_NAME})\.({_NAME})(?:\.([0-9]{{1,9}})\.({_NAME}))?")

FINE = frozenset({UsageDimension.HOUR, UsageDimension.MODEL})
"""Dimensions that usage by day does not have."""

SUMMED = "gpu_seconds", "money", "chunks", "video_seconds", "viewer_seconds", "delivered_bytes"
"""Names of what usage adds up."""
_EMPTY = "key", "model"
"""Dimensions whose rows may have ''."""
COUNTED = "chunks", "delivered_bytes"
"""Those that are whole numbers. They stay within `NUMBER_LIMIT`, which is what a message carries."""


@dataclass(frozen=True, order=True)
class Place:
    """Where a page ends: the key of its last row. `key` '': sessions without a key.

    A dimension over which the rows are sums is 0 or ''.
    """

    day: int = 0
    tenant: str = ""
    key: str = ""
    hour: int = 0
    model: str = ""

    @classmethod
    def parse(cls, text: str | None) -> Place | None:
        """Return the place that a page's `next` names. Raises InvalidInputError."""
        if text is None:
            return None
        found = _TEXT.fullmatch(text)
        if found is None:
            raise InvalidInputError("after: not a page's `next`", field="after")
        return cls(int(found[1]), found[2], found[3], int(found[4] or 0), found[5] or "")

    def __str__(self) -> str:
        fine = f".{self.hour}.{self.model}" if self.hour or self.model else ""
        return f"{self.day}.{self.tenant}.{self.key}{fine}"


def dimensions(group_by: Sequence[UsageDimension]) -> tuple[UsageDimension, ...]:
    """Return the dimensions of `group_by` in the order of rows, each once. Those of a day if it is empty."""
    return tuple(one for one in UsageDimension if one in (group_by or BY_DAY))


def page_of(rows: Sequence[Mapping[str, Any]], limit: int, group_by: Sequence[UsageDimension]) -> UsagePage:
    """Return the first `limit` rows as a page. A row has the dimensions of `group_by`, or those of a day."""
    shown = rows[:limit]
    last = shown[-1] if len(rows) > limit else None
    following = None
    if last is not None:
        following = str(Place(**{name: last[name] for name in UsageDimension if name in last}))
    # A row of an earlier version may have a greater count.
    counted = [{**row, **{name: min(row[name], NUMBER_LIMIT) for name in COUNTED}} for row in shown]
    named = [{**row, **{name: row[name] or None for name in _EMPTY if name in row}} for row in counted]
    if group_by:
        groups = tuple(UsageGroup.model_validate(row) for row in named)
        return UsagePage(days=(), groups=groups, next=following)
    return UsagePage(days=tuple(UsageDay.model_validate(row) for row in named), next=following)
