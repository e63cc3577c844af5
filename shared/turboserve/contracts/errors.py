"""Typed errors with one root. Each class has a code and an HTTP status; each error says whether to retry.

Errors cross NATS as `ErrorBody`, and the caller gets the same class again. The gateway can therefore turn an
error of the state store into an RFC 9457 problem without knowing where it was raised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from turboserve.contracts.base import Contract, Note, Number


class ErrorBody(Contract):
    """An error on the wire."""

    code: str
    detail: Note
    field: Note | None = None
    limit: Number | float | Note | None = None
    retry_after_s: float | None = None

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse an error of any schema version.

        Otherwise a caller could not read that another version refuses it. `code` and `detail` therefore stay
        what they are in every MAJOR.
        """
        return cls.model_validate_json(text)


class TurboServeError(Exception):
    """Root of all typed errors.

    `field` names the invalid input or the object concerned. `limit` is the violated bound. `retry_after_s`
    says when to retry, in seconds (None: the same call will fail again).
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"

    answered: bool = False
    """Whether the server itself answered with this error, which shows that it runs."""

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
        # JSON has no infinity.
        self.limit = str(limit) if isinstance(limit, float) and not math.isfinite(limit) else limit
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


@dataclass(frozen=True)
class FieldError:
    """One invalid field of a request, and the bound that it met."""

    field: str
    message: str
    limit: str | int | float | None = None


class InvalidInputError(TurboServeError):
    """A value has the wrong type or lies outside its limit."""

    code, status, title = "invalid_input", 422, "Invalid input"

    errors: tuple[FieldError, ...] = ()
    """All invalid fields, if one check found them. The error of the first one alone crosses the bus."""


class UnauthorizedError(TurboServeError):
    """The request has no API key, or an unknown one."""

    code, status, title = "unauthorized", 401, "Unauthorized"


class ForbiddenError(TurboServeError):
    """The caller's role does not allow this request."""

    code, status, title = "forbidden", 403, "Forbidden"


class SessionNotFoundError(TurboServeError):
    """The session does not exist, or belongs to another tenant. Callers cannot tell which."""

    code, status, title = "session_not_found", 404, "Session not found"


class UnknownModelError(TurboServeError):
    """No worker serves this model."""

    code, status, title = "unknown_model", 422, "Unknown model"


class TransitionError(TurboServeError):
    """The session's phase does not allow this."""

    code, status, title = "transition_not_allowed", 409, "Transition not allowed"


class ConflictError(TurboServeError):
    """A compare-and-set failed, because the row has changed. Read the row again, then decide again."""

    code, status, title = "conflict", 409, "Conflict"


class StaleEpochError(ConflictError):
    """The request is for an epoch that is over."""

    code, title = "stale_epoch", "Stale epoch"


class MigrationOverError(ConflictError):
    """The migration is over: committed, abandoned, or ended by a pause, an end or a placement."""

    code, title = "migration_over", "Migration over"


class StaleStateError(ConflictError):
    """The log has a chunk that is newer than the migrated state."""

    code, title = "stale_state", "Stale state"


class StaleTermError(ConflictError):
    """The sender is not the leader any more. It must stop deciding."""

    code, title = "stale_term", "Stale term"


class BodyTooLargeError(TurboServeError):
    """The request body is over the limit."""

    code, status, title = "body_too_large", 413, "Body too large"


class NoCapacityError(TurboServeError):
    """The workers have no capacity for another session."""

    code, status, title = "no_capacity", 429, "No capacity"


class TenantLimitError(TurboServeError):
    """A tenant has reached a limit per tenant. `field` names the limit's setting."""

    code, status, title = "tenant_limit", 429, "Tenant limit reached"


class KeyQuotaError(TurboServeError):
    """An API key has reached one of its limits. `field` is `key_` and the limit's name."""

    code, status, title = "key_quota", 429, "Limit of the API key reached"


class WorkerGoneError(TurboServeError):
    """This worker was declared gone. Its id does not return: the process restarts with a new id."""

    code, status, title = "worker_gone", 409, "Worker gone"


class NotFoundError(TurboServeError):
    """Something other than a session does not exist."""

    code, status, title = "not_found", 404, "Not found"


class KeyLimitError(TurboServeError):
    """The deployment has as many valid API keys as it may have. `limit` is their maximum number."""

    code, status, title = "key_limit", 409, "Key limit reached"


class LinkLimitError(TurboServeError):
    """There are as many links as there may be. `field` says of what, `limit` is their maximum number."""

    code, status, title = "link_limit", 409, "Link limit reached"


class WebhookLimitError(TurboServeError):
    """The tenant has as many webhooks as it may have. `limit` is their maximum number."""

    code, status, title = "webhook_limit", 409, "Webhook limit reached"


class UnavailableError(TurboServeError):
    """A service or server does not answer at the moment."""

    code, status, title = "unavailable", 503, "Unavailable"


class IncompatibleVersionError(UnavailableError):
    """Sender and reader have schema sets of different MAJOR versions. Update the older of the two."""

    code, title = "incompatible_version", "Incompatible version"


class LogUnavailableError(UnavailableError):
    """The log accepts no appends: no space is left, or the broker's storage is off."""

    code, title = "log_unavailable", "Log unavailable"


class LogFullError(LogUnavailableError):
    """The broker has no room for this message: the stream or the broker's storage is at its limit."""

    code, title = "log_full", "Log full"


class DeadlineError(UnavailableError):
    """No answer arrived within the deadline. The call may have taken effect: read before you repeat it."""

    code, status, title = "deadline", 504, "Deadline passed"


class ChunkGoneError(TurboServeError):
    """The log does not have this chunk any more. `limit` is the index at which the video can continue: of the
    oldest chunk that the log keeps, or of the next one for a viewer who names a chunk beyond the newest."""

    code, status, title = "chunk_gone", 410, "Chunk gone"


class FencedError(TurboServeError):
    """The broker refused a chunk, because another owner's epoch is current."""

    code, status, title = "fenced", 409, "Fenced"


def _subclasses(root: type[TurboServeError]) -> dict[str, type[TurboServeError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_subclasses(child))
    return found


def error_from(body: ErrorBody) -> TurboServeError:
    """Convert `body` to its error. An unknown code becomes the root class with the same detail."""
    kind = _subclasses(TurboServeError).get(body.code, TurboServeError)
    return kind(body.detail, field=body.field, limit=body.limit, retry_after_s=body.retry_after_s)
