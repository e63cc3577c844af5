"""Pages of usage by day. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.usage import UsageDay, UsagePage

_TEXT = re.compile(r"([0-9]{1,7})\.([A-Za-z0-9_-]{1,64})\.([A-Za-z0-9_-]{0,64})")


@dataclass(frozen=True, order=True)
class Place:
    """Where a page ends: the key of its last row. `key` '': sessions without a key."""

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


def page_of(rows: Sequence[Mapping[str, Any]], limit: int) -> UsagePage:
    """Return the first `limit` rows as a page."""
    shown = rows[:limit]
    last = Place(shown[-1]["day"], shown[-1]["tenant"], shown[-1]["key"]) if shown else None
    return UsagePage(
        days=tuple(UsageDay.model_validate({**row, "key": row["key"] or None}) for row in shown),
        next=str(last) if len(rows) > limit and last is not None else None,
    )
