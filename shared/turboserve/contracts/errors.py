"""One error root. Each kind knows its code, its HTTP status and whether to try again.

Errors cross NATS as `ErrorBody` and come out at the caller as the same class, so that the gateway turns an
error of the state store into an RFC 9457 problem without knowing where it was raised.
"""

from __future__ import annotations

from typing import ClassVar

from turboserve.contracts.base import Contract, Note


class ErrorBody(Contract):
    """An error on the wire."""

    code: str
    detail: Note
    field: Note | None = None
    limit: Note | None = None
    retry_after_s: float | None = None


class TurboServeError(Exception):
    """Root of all typed errors.

    `field` names the input or thing at fault, `limit` the bound it met, `retry_after_s` when to try again
    (None: the same call will fail again).
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"

    answered: bool = False
    """Whether the server itself said so, over the bus: it is there."""

    def __init__(
        self,
        detail: str,
        *,
        field: str | None = None,
        limit: str | int | float | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.limit = None if limit is None else str(limit)
        self.retry_after_s = retry_after_s

    @property
    def retryable(self) -> bool:
        return self.retry_after_s is not None

    def body(self) -> ErrorBody:
        return ErrorBody(
            code=self.code,
            detail=self.detail,
            field=self.field,
            limit=self.limit,
            retry_after_s=self.retry_after_s,
        )


class InvalidInputError(TurboServeError):
    """A value has the wrong type or lies outside its limit."""

    code, status, title = "invalid_input", 422, "Invalid input"


class UnauthorizedError(TurboServeError):
    """No key, or a key that nobody was given."""

    code, status, title = "unauthorized", 401, "Unauthorized"


class ForbiddenError(TurboServeError):
    """The caller's role may not ask for this."""

    code, status, title = "forbidden", 403, "Forbidden"


class SessionNotFoundError(TurboServeError):
    """No such session, or it belongs to someone else: the two are told apart for nobody."""

    code, status, title = "session_not_found", 404, "Session not found"


class UnknownModelError(TurboServeError):
    """No worker serves this model."""

    code, status, title = "unknown_model", 422, "Unknown model"


class TransitionError(TurboServeError):
    """The session's phase does not allow this."""

    code, status, title = "transition_not_allowed", 409, "Transition not allowed"


class ConflictError(TurboServeError):
    """A compare-and-set lost: someone changed the row first. Read it again, then decide again."""

    code, status, title = "conflict", 409, "Conflict"


class StaleEpochError(ConflictError):
    """The sender acts for an epoch that is over."""

    code, title = "stale_epoch", "Stale epoch"


class MoveOverError(ConflictError):
    """The move is not under way any more: done, given up, or overtaken by a pause, an end, a placement."""

    code, title = "move_over", "Move over"


class StaleStateError(ConflictError):
    """The log has a chunk that the moved state does not know of."""

    code, title = "stale_state", "Stale state"


class StaleTermError(ConflictError):
    """The sender does not lead any more. It must not decide anything further: another one does."""

    code, title = "stale_term", "Stale term"


class BodyTooLargeError(TurboServeError):
    """The request body is over the limit."""

    code, status, title = "body_too_large", 413, "Body too large"


class NoCapacityError(TurboServeError):
    """More sessions than there is room for."""

    code, status, title = "no_capacity", 429, "No capacity"


class TenantLimitError(TurboServeError):
    """A tenant has as much as one tenant may have; `field` names the setting."""

    code, status, title = "tenant_limit", 429, "Tenant limit reached"


class WorkerGoneError(TurboServeError):
    """This worker was declared dead; its id never comes back. The process starts again under a new one."""

    code, status, title = "worker_gone", 409, "Worker gone"


class NotFoundError(TurboServeError):
    """Something other than a session is not there."""

    code, status, title = "not_found", 404, "Not found"


class UnavailableError(TurboServeError):
    """A service or server does not answer at the moment."""

    code, status, title = "unavailable", 503, "Unavailable"


class LogUnavailableError(UnavailableError):
    """The log stores nothing at the moment: its disk or its limit is full, or the broker's storage is off."""

    code, title = "log_unavailable", "Log unavailable"


class LogFullError(LogUnavailableError):
    """The broker has no room left for this message, by the limit of the stream or of its storage."""

    code, title = "log_full", "Log full"


class DeadlineError(UnavailableError):
    """No answer within the deadline. Whether the call took effect is not known: read before you repeat."""

    code, status, title = "deadline", 504, "Deadline passed"


class FencedError(TurboServeError):
    """The broker refused a chunk: another owner's epoch is current."""

    code, status, title = "fenced", 409, "Fenced"


def _subclasses(root: type[TurboServeError]) -> dict[str, type[TurboServeError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_subclasses(child))
    return found


def error_from(body: ErrorBody) -> TurboServeError:
    """The error that `body` describes; an unknown code becomes the root class with that text."""
    kind = _subclasses(TurboServeError).get(body.code, TurboServeError)
    return kind(body.detail, field=body.field, limit=body.limit, retry_after_s=body.retry_after_s)
