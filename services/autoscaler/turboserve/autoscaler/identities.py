"""Which broker identity a launched worker gets: its id begins with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from pydantic import SecretStr

from turboserve.broker_accounts import worker_user
from turboserve.ids import new_id
from turboserve.subjects import identity_of

PREFIX = "wrk"
"""Of the ids of workers without identities of their own."""


class WorkerNames:
    """Gives ids to new workers.

    An identity without a worker comes first, and of those the one that was given longest ago: a process that
    is still ending under it has the most time to end.
    """

    def __init__(self, identities: Iterable[str], workers: Callable[[], Iterable[str]]) -> None:
        """`workers`: the ids of the pool's workers at this moment."""
        self._identities, self._workers = list(identities), workers

    def new(self) -> str:
        """An id that was never used before."""
        if not self._identities:
            return new_id(PREFIX)
        used = Counter(map(identity_of, self._workers()))
        chosen = min(self._identities, key=lambda identity: used[identity])
        self._identities.remove(chosen)
        self._identities.append(chosen)
        return new_id(chosen)


def credentials(worker: str, identities: Mapping[str, SecretStr]) -> dict[str, str]:
    """The variables by which `worker` connects as its identity; none if it has none of its own."""
    identity = identity_of(worker)
    password = identities.get(identity)
    if password is None:
        return {}
    return {
        "TURBOSERVE_NATS_USER": worker_user(identity),
        "TURBOSERVE_NATS_PASSWORD": password.get_secret_value(),
    }
