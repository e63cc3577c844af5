"""Broker identities of launched workers. A worker's id begins with its identity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from pydantic import SecretStr

from turboserve.broker_accounts import worker_user
from turboserve.ids import new_id
from turboserve.subject_types import identity_of

PREFIX = "wrk"
"""Prefix of the ids of workers without an identity of their own."""


class WorkerNames:
    """Makes ids of new workers.

    The identity with the fewest workers comes first; of those, the one that was given longest ago. So a
    process that is still ending under an identity has the most time to end.
    """

    def __init__(self, identities: Iterable[str], workers: Callable[[], Iterable[str]]) -> None:
        """`workers` returns the ids of the pool's present workers."""
        self._identities, self._workers = list(identities), workers

    def new(self) -> str:
        """Return a worker id that was never used before."""
        if not self._identities:
            return new_id(PREFIX)
        used = Counter(map(identity_of, self._workers()))
        chosen = min(self._identities, key=lambda identity: used[identity])
        self._identities.remove(chosen)
        self._identities.append(chosen)
        return new_id(chosen)


def credentials(worker: str, identities: Mapping[str, SecretStr]) -> dict[str, str]:
    """Return the environment variables by which `worker` connects as its identity, if it has one."""
    identity = identity_of(worker)
    password = identities.get(identity)
    if password is None:
        return {}
    return {
        "TURBOSERVE_NATS_USER": worker_user(identity),
        "TURBOSERVE_NATS_PASSWORD": password.get_secret_value(),
    }
