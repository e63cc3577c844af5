"""Errors between two workers. Each names the thing, and says whether to try again."""

from __future__ import annotations

from turboserve.contracts.workers import NO_STATE


class TransferError(Exception):
    """Root of the errors. `code` is stable: metrics, the wire and the reason of a failed migration use it."""

    code = "transfer_error"
    retryable = True
    """Whether the same migration may succeed on another attempt."""


class PeerLostError(TransferError):
    """The other worker is lost, or has closed the connection."""

    code = "peer_lost"


class DeadlineExceededError(TransferError):
    """The other worker did not answer, or memory was not transferred, within the deadline."""

    code = "deadline_passed"


class TransferAbortedError(TransferError):
    """This side has aborted the transfer."""

    code = "aborted"
    retryable = False


class TransferProtocolError(TransferError):
    """A frame of the control channel is malformed or not allowed at this point."""

    code = "protocol_broken"
    retryable = False


class AuthenticationError(TransferError):
    """The other side did not prove the key of this migration, or a frame is not from the other side.

    Another attempt may succeed: one of the two may not know of the migration yet.
    """

    code = "not_authenticated"


class TransferBackendError(TransferError):
    """The library that transfers memory reports an error."""

    code = "backend_failed"


class TransferTooSlowError(TransferError):
    """The session would be quiesced for too long while the rest of its state is copied."""

    code = "too_slow"
    retryable = False


class NoCommonBackendError(TransferError):
    """The two workers have no transfer backend in common."""

    code = "no_backend"
    retryable = False


class MigrationNotOfferedError(TransferError):
    """The source's row does not say that this session migrates to this worker in this migration."""

    code = "not_offered"


class SourceNotReadyError(TransferError):
    """The source cannot send the state now."""

    code = "not_ready"


class NoStateError(TransferError):
    """The source does not have the session's state."""

    code = NO_STATE
    retryable = False


class LayoutMismatchError(TransferError):
    """The pages are not those of a session of this worker's model."""

    code = "wrong_layout"
    retryable = False


class TruncatedStateError(TransferError):
    """Fewer bytes arrived than were announced."""

    code = "truncated"


class DigestMismatchError(TransferError):
    """The state that arrived is not the one that was sent."""

    code = "digest_mismatch"

    def __init__(self, found: str, wanted: str) -> None:
        super().__init__(f"digest: {found}, the source says {wanted}")


def error_of(code: str, detail: str) -> TransferError:
    """The error with the other side's code; a plain `TransferError` if the code is unknown."""
    kinds = {kind.code: kind for kind in TransferError.__subclasses__() if kind is not DigestMismatchError}
    return kinds.get(code, TransferError)(detail)
