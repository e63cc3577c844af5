"""Errors of the client. All derive from `TurboServeError`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TurboServeError(Exception):
    """Base of all errors of this client."""


class GatewayUnreachableError(TurboServeError):
    """The gateway did not answer, also after all attempts. A request may have taken effect."""


class ProblemError(TurboServeError):
    """The gateway refused a request (RFC 9457)."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.code = str(problem.get("code") or "unknown")
        """Stable name of the problem, such as `invalid_input`."""
        self.detail = str(problem.get("detail") or problem.get("title") or status)
        self.field: str | None = problem.get("field")
        """Input at fault."""
        self.limit: Any = problem.get("limit")
        """Bound that the input met."""
        self.errors: list[dict[str, Any]] = list(problem.get("errors") or ())
        """All invalid inputs, each with `field`, `message` and `limit`."""
        self.retry_after_s: float | None = problem.get("retry_after_s")
        """Time after which a retry may succeed, seconds. None: a retry does not help."""
        self.request_id: str | None = problem.get("request_id")
        """Id of the request in the logs of the services. None: it is not known."""
        super().__init__(f"{self.code}: {self.detail}")


class UnauthorizedError(ProblemError):
    """The key is missing, wrong or revoked."""


class NotFoundError(ProblemError):
    """There is no such session, or another tenant owns it."""


class NoCapacityError(ProblemError):
    """The deployment or the tenant's limit is full; `retry_after_s` has the time to wait, if it is known."""


class ChunkGoneError(ProblemError):
    """The log does not have the next chunk any more. The video continues at `continues_at`."""

    @property
    def continues_at(self) -> int:
        """Index of the chunk at which the video continues."""
        return int(self.limit or 0)


class PromptSupersededError(TurboServeError):
    """A later prompt took effect first: no chunk shows this prompt."""

    def __init__(self, prompt_id: str, superseded_by: str) -> None:
        super().__init__(f"prompt {prompt_id} was superseded by {superseded_by} before a chunk showed it")
        self.prompt_id = prompt_id
        self.superseded_by = superseded_by


class ControlSupersededError(TurboServeError):
    """A later value of the control took effect first: no chunk shows this value."""

    def __init__(self, control_id: str, superseded_by: str) -> None:
        super().__init__(f"control {control_id} was superseded by {superseded_by} before a chunk showed it")
        self.control_id = control_id
        self.superseded_by = superseded_by


class SessionEndedError(TurboServeError):
    """The session ended before what the caller waits for."""

    def __init__(self, session: str, reason: str | None) -> None:
        super().__init__(f"session {session} has ended" + (f": {reason}" if reason else ""))
        self.session = session
        self.reason = reason


class ProtocolError(TurboServeError):
    """The gateway's messages are not those of this client's protocol version."""


def problem_error(status: int, problem: Mapping[str, Any]) -> ProblemError:
    """Return the error of a problem, by its status and code."""
    code = problem.get("code")
    if status == 401:
        return UnauthorizedError(status, problem)
    if status == 404:
        return NotFoundError(status, problem)
    if status == 410:
        return ChunkGoneError(status, problem)
    if code in ("no_capacity", "tenant_limit", "key_quota", "too_many_streams"):
        return NoCapacityError(status, problem)
    return ProblemError(status, problem)
