"""The gateways of one deployment: which one is in use, and when it counts as silent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

SILENT_S = 2.0
"""A gateway that has not answered a stream for this long is left for another, seconds."""
LONGEST_SILENT_S = 16.0
"""Maximum of that time, seconds. It doubles with each change that brought no video, for slow networks."""
ANSWER_S = 4.0
"""Time limit of an attempt of a request, if there is another gateway, seconds. A gateway itself answers
within 3 s (its `request_deadline_s`)."""


class Gateways:
    """Addresses of gateways that serve the same sessions. Streams and requests of one client share them."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises ValueError for an invalid address, and if there is none."""
        if not urls:
            raise ValueError("base_url: at least one address is needed")
        self._urls = [_checked(url) for url in urls]
        self._used = 0

    @property
    def current(self) -> str:
        """The address in use, without a slash at its end."""
        return self._urls[self._used]

    @property
    def count(self) -> int:
        return len(self._urls)

    @property
    def several(self) -> bool:
        return len(self._urls) > 1

    def learn(self, urls: Iterable[str]) -> None:
        """Add addresses that a gateway has named. A key that is sent encrypted stays encrypted."""
        for url in urls:
            try:
                checked = _checked(url)
            except ValueError:
                continue
            if checked not in self._urls and urlsplit(checked).scheme == urlsplit(self._urls[0]).scheme:
                self._urls.append(checked)

    def leave(self, url: str) -> None:
        """Use the address after `url`, unless another one is in use already."""
        if url == self.current:
            self._used = (self._used + 1) % len(self._urls)


class SilenceWatch:
    """Decides when a gateway counts as silent, and when to ping it. Methods take the monotonic time."""

    def __init__(self) -> None:
        self.limit_s = SILENT_S
        self._asked_at: float | None = None
        self.reads = True
        """Whether the client reads messages. If it does not, silence tells nothing about the gateway."""

    def asked(self, now: float) -> None:
        """Note that the gateway was asked for something: a connection, or the answer to a ping."""
        self._asked_at = now

    def heard(self, *, video: bool = False) -> None:
        """Note a message of the gateway. `video`: it was a chunk."""
        self._asked_at = None
        if video:
            self.limit_s = SILENT_S

    @property
    def wants_ping(self) -> bool:
        """Whether nothing that was asked is still unanswered."""
        return self.reads and self._asked_at is None

    def silent(self, now: float) -> bool:
        """Return whether the gateway owes an answer for longer than the limit."""
        return self.reads and self._asked_at is not None and now - self._asked_at >= self.limit_s

    def left(self) -> None:
        """Note that the gateway was left. The next one gets more time, in case the network is slow."""
        self._asked_at = None
        self.limit_s = min(LONGEST_SILENT_S, 2 * self.limit_s)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url: {url!r} must begin with http:// or https:// and name a host")
    return url.rstrip("/")
