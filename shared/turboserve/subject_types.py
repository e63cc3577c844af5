"""Kinds of subjects: requests, messages that may be lost, and logs. `subjects` is the table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from turboserve.contracts.base import Contract

Req = TypeVar("Req", bound=Contract)
Resp = TypeVar("Resp", bound=Contract)
Msg = TypeVar("Msg", bound=Contract)


def identity_of(worker: str) -> str:
    """Return the broker identity of a worker's id: the part before the first `_`."""
    return worker.partition("_")[0]


@dataclass(frozen=True)
class Caller:
    """The sender of a request. The broker lets each user name only itself in the request's subject."""

    role: str
    """A service's name, or `subjects.ADMIN`."""
    id: str | None = None
    """Identity of a worker with its own broker user. None: the role has one user."""

    @property
    def token(self) -> str:
        """The caller's part of a subject: `gateway`, or `worker.wk1`."""
        return self.role if self.id is None else f"{self.role}.{self.id}"

    @classmethod
    def from_token(cls, token: str) -> Caller:
        """Parse a caller's token. Raises ValueError for anything that `token` never returns."""
        role, *rest = token.split(".")
        if not role or len(rest) > 1 or "" in rest:
            raise ValueError(f"caller: {token!r} is not ROLE or ROLE.ID")
        return cls(role, *rest)


@dataclass(frozen=True)
class Endpoint(Generic[Req, Resp]):
    """Request and reply with a deadline. One of the server's instances answers (queue group).

    The subject of a request is `SUBJECT.from.CALLER`.
    """

    subject: str
    request: type[Req]
    response: type[Resp]
    server: str
    callers: tuple[str, ...]
    periodic: bool = False
    """Whether services send the request at intervals. Such requests are not traced by default."""

    def request_subject(self, caller: str) -> str:
        """Return the subject to which the caller with this token sends requests."""
        return f"{self.subject}.from.{caller}"

    @property
    def every(self) -> str:
        """Pattern of the requests of all callers."""
        return f"{self.subject}.from.>"

    def caller_of(self, subject: str) -> Caller:
        """Return the sender of a request that arrived on `subject`. Raises ValueError if there is none."""
        prefix, _, token = subject.partition(".from.")
        if prefix != self.subject:
            raise ValueError(f"subject: {subject!r} is no request to {self.subject}")
        return Caller.from_token(token)


@dataclass(frozen=True)
class Topic(Generic[Msg]):
    """Publish and subscribe with at-most-once delivery, only for messages whose loss is repaired otherwise.

    `pattern` has one `{id}`: the session, worker, model or pool that a message is about.
    """

    pattern: str
    message: type[Msg]
    senders: tuple[str, ...]
    readers: tuple[str, ...]
    by_worker: bool = False
    """Whether `{id}` is a worker, as `IDENTITY.WORKER`. The identity lets permissions tell workers apart."""
    author: str | None = None
    """Field of the message that names the sending worker or pool. It must be the one in the subject."""

    @cached_property
    def _around(self) -> tuple[str, str]:
        before, _, after = self.pattern.partition("{id}")
        return before, after

    def of(self, token: str) -> str:
        before, after = self._around
        return f"{before}{identity_of(token)}.{token}{after}" if self.by_worker else f"{before}{token}{after}"

    def of_identity(self, identity: str | None) -> str:
        """Pattern of what the workers of this identity send or read. None: all subjects of the topic."""
        return self.pattern.format(id=f"{identity or '*'}.*" if self.by_worker else "*")

    @property
    def every(self) -> str:
        return self.of_identity(None)

    @property
    def internal(self) -> bool:
        """Whether only processes of one service send and read the messages."""
        return len(self.senders) == 1 and self.senders == self.readers


@dataclass(frozen=True)
class Log:
    """Subjects in a stream, one per session or worker. The broker republishes accepted messages.

    `live_pattern` has the subjects of republished messages. A canary's pattern has no `{id}`: it is one
    subject.
    """

    stream: str
    pattern: str
    live_pattern: str | None
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    """Services that receive republished messages."""
    history_readers: tuple[str, ...] = ()
    """Services that read stored messages."""
    by_identity: bool = False
    """Whether the writer's identity follows `{id}`. The identity lets permissions tell workers apart."""

    def of(self, token: str) -> str:
        """Return the subject of entries about `token`, or the pattern that covers all identities."""
        return self._with_identity(self.pattern, token, "*")

    def by(self, token: str, worker: str) -> str:
        """Return the subject to which `worker` appends entries about `token`."""
        return self._with_identity(self.pattern, token, identity_of(worker))

    def of_identity(self, identity: str | None) -> str:
        """Return the pattern of what the workers of this identity append. None: of all entries."""
        return self._with_identity(self.pattern, "*", identity or "*")

    def token(self, subject: str) -> str:
        """Return the session or worker that a subject of this log is about."""
        return subject.removeprefix(self._prefix).partition(".")[0]

    def identity(self, subject: str) -> str | None:
        """Return the identity in a subject of this log, or None if the subject names no identity."""
        return subject.removeprefix(self._prefix).partition(".")[2] or None

    @cached_property
    def _prefix(self) -> str:
        return self.pattern.format(id="")

    @cached_property
    def _kind(self) -> str:
        return f"{self.pattern.partition('.')[0]}."

    def live(self, token: str) -> str:
        assert self.live_pattern is not None
        return self._with_identity(self.live_pattern, token, "*")

    @property
    def every(self) -> str:
        return self.of_identity(None)

    def takes(self, subject: str) -> bool:
        """Whether messages on `subject` belong to this log. Subjects of earlier versions do, too."""
        return subject.startswith(self._kind) and subject.count(".") <= 1 + self.by_identity

    def _with_identity(self, pattern: str, token: str, identity: str) -> str:
        return pattern.replace("{id}", f"{token}.{identity}" if self.by_identity else token)
