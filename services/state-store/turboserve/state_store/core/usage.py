"""Pages of usage by day. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.usage import UsageDay, UsageDimension, UsageGroup, UsagePage

_TEXT = re.compile(r"([0-9]{1,7})\.([A-Za-z0-9_-]{0,64})\.([A-Za-z0-9_-]{0,64})")

SUMMED = "gpu_seconds", "money", "chunks", "video_seconds", "viewer_seconds", "delivered_bytes"
"""Names of what usage adds up."""
COUNTED = "chunks", "delivered_bytes"
"""Those that are whole numbers. They stay within `NUMBER_LIMIT`, which is what a message carries."""


@dataclass(frozen=True, order=True)
class Place:
    """Where a page ends: the key of its last row. `key` '': sessions without a key.

    A dimension over which the rows are sums is 0 or ''.
    """

    day: int
    tenant: str
    key: str

    @classmethod
    def parse(cls, text: str | None) -> Place | None:
        """Return the place that a page's `next` names. Raises InvalidInputError."""
        if text is None:
            return None
        found = _TEXT.fullmatch(text)
        if found is None:
            raise InvalidInputError("after: not a page's `next`", field="after")
        return cls(int(found[1]), found[2], found[3])

    def __str__(self) -> str:
        return f"{self.day}.{self.tenant}.{self.key}"


def dimensions(group_by: Sequence[UsageDimension]) -> tuple[UsageDimension, ...]:
    """Return the dimensions of `group_by` in the order of rows, each once. All if it is empty."""
    return tuple(one for one in UsageDimension if not group_by or one in group_by)


def page_of(rows: Sequence[Mapping[str, Any]], limit: int, group_by: Sequence[UsageDimension]) -> UsagePage:
    """Return the first `limit` rows as a page. A row has the dimensions of `group_by`, or all."""
    shown = rows[:limit]
    last = shown[-1] if len(rows) > limit else None
    following = None
    if last is not None:
        following = str(Place(last.get("day", 0), last.get("tenant", ""), last.get("key", "")))
    # A row of an earlier version may have a greater count.
    counted = [{**row, **{name: min(row[name], NUMBER_LIMIT) for name in COUNTED}} for row in shown]
    named = [{**row, "key": row.get("key") or None} for row in counted]
    if group_by:
        groups = tuple(UsageGroup.model_validate(row) for row in named)
        return UsagePage(days=(), groups=groups, next=following)
    return UsagePage(days=tuple(UsageDay.model_validate(row) for row in named), next=following)
