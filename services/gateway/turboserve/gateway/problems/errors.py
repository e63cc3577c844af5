"""Errors of the HTTP edge itself."""

from __future__ import annotations

from turboserve.contracts.errors import InvalidInputError, NoCapacityError, TurboServeError, UnavailableError


class MalformedRequestError(TurboServeError):
    """The request cannot be read at all."""

    code, status, title = "malformed_request", 400, "Malformed request"


class MethodNotAllowedError(TurboServeError):
    """The path exists, the method on it does not."""

    code, status, title = "method_not_allowed", 405, "Method not allowed"


class RequestTimeoutError(TurboServeError):
    """The request did not arrive in time; `limit` is how long it may take, seconds."""

    code, status, title = "request_timeout", 408, "Request timeout"


class HeadersTooLargeError(TurboServeError):
    """The request has too many headers, or too long ones; `limit` is the bytes of all together."""

    code, status, title = "headers_too_large", 431, "Headers too large"


class TooManyConnectionsError(UnavailableError):
    """The gateway serves as many connections as it may have."""

    code, title = "too_many_connections", "Too many connections"


class TooManyOfAddressError(NoCapacityError):
    """The client's address has as many connections as one may have."""

    code, title = "too_many_of_address", "Too many connections of this address"


class UpgradeRequiredError(TurboServeError):
    """What is here speaks WebSocket only."""

    code, status, title = "upgrade_required", 426, "Upgrade required"


class UnsupportedMediaTypeError(TurboServeError):
    """The body does not say that it is JSON."""

    code, status, title = "unsupported_media_type", 415, "Unsupported media type"


class ForbiddenOriginError(TurboServeError):
    """A page of a foreign origin may neither change anything nor open a socket here."""

    code, status, title = "forbidden_origin", 403, "Forbidden origin"


class HostNotAllowedError(TurboServeError):
    """The request is for a name that this gateway does not answer to."""

    code, status, title = "host_not_allowed", 421, "Host not allowed"


class TooManyWrongKeysError(TurboServeError):
    """One address has sent more wrong API keys than the limit; a known key still passes."""

    code, status, title = "too_many_wrong_keys", 429, "Too many wrong keys"


class ChunkGoneError(TurboServeError):
    """The log no longer keeps this chunk; `limit` is the index of the oldest that it keeps."""

    code, status, title = "chunk_gone", 410, "Chunk gone"


class ChunkNotMadeError(InvalidInputError):
    """Nobody can have seen this chunk yet; `limit` is the index of the newest."""

    code, title = "chunk_not_made", "Chunk not made yet"


class TooManyStreamsError(NoCapacityError):
    """This gateway serves as many streams as it is allowed to."""

    code, title = "too_many_streams", "Too many streams"


class KeyReusedError(InvalidInputError):
    """The same Idempotency-Key came with a different request."""

    code, title = "idempotency_key_reused", "Idempotency key reused"
