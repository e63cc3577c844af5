"""What can go wrong between two workers. Each error names the thing, and says whether to try again."""

from __future__ import annotations

from turboserve.contracts.workers import NO_STATE


class TransferError(Exception):
    """Root. `code` is stable: for metrics, for the wire, for the reason of a move that failed."""

    code = "transfer_error"
    retryable = True
    """Whether the same move may succeed on another attempt."""


class PeerLostError(TransferError):
    """The other worker is gone, or has hung up."""

    code = "peer_lost"


class DeadlineExceededError(TransferError):
    """The other worker did not answer, or memory did not move, within the deadline."""

    code = "deadline_passed"


class TransferAbortedError(TransferError):
    """This side has given the transfer up."""

    code = "aborted"
    retryable = False


class TransferProtocolError(TransferError):
    """What came over the control channel is not what may come there."""

    code = "protocol_broken"
    retryable = False


class AuthenticationError(TransferError):
    """The other side did not prove the key of this migration, or a frame is not the other side's.

    Another attempt may succeed: one of the two may not have heard of the migration yet.
    """

    code = "not_authenticated"


class TransferBackendError(TransferError):
    """The library that moves memory reports an error."""

    code = "backend_failed"


class TransferTooSlowError(TransferError):
    """The session would have to stand still too long while the rest of its state is copied."""

    code = "too_slow"
    retryable = False


class NoCommonBackendError(TransferError):
    """The two workers have no way to move memory in common."""

    code = "no_backend"
    retryable = False


class MigrationNotOfferedError(TransferError):
    """The source's row does not say that this session moves to this worker in this move."""

    code = "not_offered"


class SourceNotReadyError(TransferError):
    """The source cannot give the state away just now."""

    code = "not_ready"


class NoStateError(TransferError):
    """The source does not have the session's state: there is nothing to move."""

    code = NO_STATE
    retryable = False


class LayoutMismatchError(TransferError):
    """The pages are not those of a session of this worker's model."""

    code = "wrong_layout"
    retryable = False


class TruncatedStateError(TransferError):
    """Fewer bytes came than were announced."""

    code = "truncated"


class DigestMismatchError(TransferError):
    """The state that arrived is not the one that was sent."""

    code = "digest_mismatch"

    def __init__(self, found: str, wanted: str) -> None:
        super().__init__(f"digest: {found}, the source says {wanted}")


def error_of(code: str, detail: str) -> TransferError:
    """The error that the other side names; an unknown code becomes the root with that text."""
    kinds = {kind.code: kind for kind in TransferError.__subclasses__() if kind is not DigestMismatchError}
    return kinds.get(code, TransferError)(detail)
