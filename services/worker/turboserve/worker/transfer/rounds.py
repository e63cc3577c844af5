"""Which pages a source sends while its session generates, and when another round would not shorten the pause.

With each chunk a session writes its next ring positions, whose frames leave the window. What is sent of them
shortly before is sent in vain. So pages that stay as they are for longest go first, and a round has only
pages that outlast it. Rounds end when they find as much written again as they send.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from turboserve.worker.engine.state_pages import Page, changed

ROUND_S = 0.5
"""Longest round at the measured rate, seconds: the next one is planned with what was written meanwhile."""
ROUND_BYTES = 64 << 20
"""Size that a round may have at any rate, bytes."""
SMALL_BYTES = 4 << 20
"""Smallest delta that is worth another round, bytes."""
GAIN_SHARE = 0.25
"""Share of a round's bytes by which the round must shrink what is left."""
ROUNDS_WITHOUT_GAIN = 2
"""Number of rounds in a row without that gain after which there is no further one."""
COPIES_LIMIT = 2
"""Number of times that a state's bytes are sent at most while its session generates."""


@dataclass(eq=False)
class RoundPlan:
    """The rounds of one copy while its session generates. Pure."""

    left_bytes: int = 0
    """Bytes that were not sent, or written again, when the last round was planned."""
    _sent_bytes: int = 0
    _without_gain: int = 0
    _wanted_bytes: float = 0.0
    """Largest `left_bytes` after the last round that counts as a gain. 0: there was no round."""
    _stamps: dict[str, object] = field(default_factory=dict)
    _rewritten: set[str] = field(default_factory=set)
    """Names of the pages that were seen to change."""

    def next_round(self, pages: Sequence[Page], sent: Mapping[str, object], bytes_per_s: float) -> list[Page]:
        """Plan the next round.

        Args:
            pages: All pages that no current work writes to.
            sent: Stamps of the pages that the target has, by name.
            bytes_per_s: Measured rate; 0 before the first round.

        Returns:
            Its pages; none if the session is to be quiesced now.
        """
        pages = self.foreseen(pages)
        dirty = changed(pages, sent)
        self.left_bytes = _size(dirty)
        if sent and self.left_bytes < SMALL_BYTES:
            return []
        if self._sent_bytes:
            gained = self.left_bytes <= self._wanted_bytes
            self._without_gain = 0 if gained else self._without_gain + 1
        if self._without_gain >= ROUNDS_WITHOUT_GAIN or self._sent_bytes > COPIES_LIMIT * _size(pages):
            return []
        chosen = lasting(dirty, bytes_per_s)
        size = _size(chosen)
        if size - _lost(pages, sent, size, bytes_per_s) < GAIN_SHARE * size:
            return []
        self._sent_bytes += size
        self._wanted_bytes = self.left_bytes - GAIN_SHARE * size
        return chosen

    def foreseen(self, pages: Sequence[Page]) -> list[Page]:
        """The pages, with no expectation for those that were guessed to change and have not been seen to."""
        for page in pages:
            if page.name in self._stamps and self._stamps[page.name] != page.stamp:
                self._rewritten.add(page.name)
            self._stamps[page.name] = page.stamp
        return [
            replace(page, lasts_s=math.inf) if page.guessed and page.name not in self._rewritten else page
            for page in pages
        ]


def lasting(dirty: Sequence[Page], bytes_per_s: float) -> list[Page]:
    """The pages of one round: those that stay as they are for longest, as far as they outlast the round."""
    room = max(ROUND_BYTES, ROUND_S * bytes_per_s)
    chosen: list[Page] = []
    size = 0
    for page in sorted(dirty, key=lambda page: (-page.lasts_s, page.guessed)):
        size += page.size
        if (chosen and size > room) or (bytes_per_s and page.lasts_s < size / bytes_per_s):
            break
        chosen.append(page)
    return chosen


def _lost(pages: Sequence[Page], sent: Mapping[str, object], size: int, bytes_per_s: float) -> int:
    """Bytes that the target has, and that are written again while `size` bytes are sent."""
    if not bytes_per_s:
        return 0
    changed_names = {page.name for page in changed(pages, sent)}
    return sum(
        page.size for page in pages if page.name not in changed_names and page.lasts_s < size / bytes_per_s
    )


def _size(pages: Sequence[Page]) -> int:
    return sum(page.size for page in pages)
