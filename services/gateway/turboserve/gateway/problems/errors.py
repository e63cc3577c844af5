"""Errors that the gateway itself raises for requests and connections."""

from __future__ import annotations

from turboserve.contracts.errors import (
    InvalidInputError,
    NoCapacityError,
    TurboServeError,
    UnauthorizedError,
    UnavailableError,
)


class MalformedRequestError(TurboServeError):
    """The request cannot be read at all."""

    code, status, title = "malformed_request", 400, "Malformed request"


class MethodNotAllowedError(TurboServeError):
    """The path exists but does not support the method."""

    code, status, title = "method_not_allowed", 405, "Method not allowed"


class RequestTimeoutError(TurboServeError):
    """The request did not arrive in time. `limit` is the time allowed, seconds."""

    code, status, title = "request_timeout", 408, "Request timeout"


class HeadersTooLargeError(TurboServeError):
    """The request has too many or too long headers. `limit` is the maximum size of all headers, bytes."""

    code, status, title = "headers_too_large", 431, "Headers too large"


class TooManyConnectionsError(UnavailableError):
    """The gateway has reached its limit of connections."""

    code, title = "too_many_connections", "Too many connections"


class TooManyOfAddressError(NoCapacityError):
    """The client's address has reached the limit of connections per address."""

    code, title = "too_many_of_address", "Too many connections of this address"


class UpgradeRequiredError(TurboServeError):
    """The resource is available only over WebSocket."""

    code, status, title = "upgrade_required", 426, "Upgrade required"


class UnsupportedMediaTypeError(TurboServeError):
    """The body is not declared as JSON."""

    code, status, title = "unsupported_media_type", 415, "Unsupported media type"


class ForbiddenOriginError(TurboServeError):
    """A page of a foreign origin may neither change anything nor open a socket here."""

    code, status, title = "forbidden_origin", 403, "Forbidden origin"


class HostNotAllowedError(TurboServeError):
    """The Host header has a name that this gateway does not answer to."""

    code, status, title = "host_not_allowed", 421, "Host not allowed"


class TooManyWrongKeysError(TurboServeError):
    """One address has sent more wrong API keys than the limit. A known key still passes."""

    code, status, title = "too_many_wrong_keys", 429, "Too many wrong keys"


class KeysUnreadError(UnavailableError):
    """This gateway has not read the API keys from the state store yet, so it cannot check any."""

    code, title = "keys_unread", "API keys not read yet"


class KeysNotStoredError(TurboServeError):
    """The API keys of this gateway are not in the database, so no request can change them."""

    code, status, title = "keys_not_stored", 409, "API keys not in the database"


class KeyInAddressError(UnauthorizedError):
    """The request has an API key in its address, where logs and histories keep it."""

    code, title = "key_in_address", "API key in the address"


class LinkEndedError(UnauthorizedError):
    """The link was revoked or has expired."""

    code, title = "link_ended", "Link ended"


class TicketExpiredError(UnauthorizedError):
    """The ticket has expired. A new one opens the stream."""

    code, title = "ticket_expired", "Ticket expired"


class LinkRoleError(TurboServeError):
    """A link's role does not allow the operation. `limit` is the role that does; None: no role does."""

    code, status, title = "link_role", 403, "Not allowed by the link"


class MissingScopeError(TurboServeError):
    """The key lacks the scope that the operation needs. `limit` is the scope."""

    code, status, title = "missing_scope", 403, "Missing scope"


class TooManyStreamsError(NoCapacityError):
    """This gateway has reached its limit of streams."""

    code, title = "too_many_streams", "Too many streams"


class KeyReusedError(InvalidInputError):
    """The idempotency key was used before with a different request."""

    code, title = "idempotency_key_reused", "Idempotency key reused"


class InvalidOfferError(TurboServeError):
    """The body is no SDP offer, or lacks a part that WebRTC needs. `field` is the part."""

    code, status, title = "invalid_offer", 400, "Invalid offer"


class UnsupportedOfferError(TurboServeError):
    """The SDP offer does not receive H.264 video, which is all that the gateway sends."""

    code, status, title = "unsupported_offer", 422, "Unsupported offer"


class PeerNotFoundError(TurboServeError):
    """This gateway has no such WebRTC viewer of the session. The viewer may have left, or be at another."""

    code, status, title = "peer_not_found", 404, "Viewer not found"
