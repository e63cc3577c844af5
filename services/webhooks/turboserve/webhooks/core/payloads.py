"""The body of a message: an envelope around the event as clients get it."""

from __future__ import annotations

import json
from typing import Any

from turboserve.contracts.events import session_event_from_bytes
from turboserve.contracts.public_events import public_event
from turboserve.contracts.public_types import written
from turboserve.contracts.webhooks import TakenDelivery

VERSION = 1
"""Version of the payload. Members are added under the same version."""
OWN_KIND = "webhook."
"""Beginning of the types of events about webhooks themselves."""


def payload(delivery: TakenDelivery) -> bytes:
    """Return the body to send, the same bytes at every attempt.

    Raises pydantic's ValidationError and SchemaVersionError for an event that this version cannot read.
    """
    data: dict[str, Any]
    if delivery.type.startswith(OWN_KIND):
        data = json.loads(delivery.body)
    else:
        event = public_event(session_event_from_bytes(delivery.body.encode()))
        data = {"session": delivery.session, **event.model_dump(mode="json", exclude_none=True)}
    message = {
        "type": delivery.type,
        "version": VERSION,
        "timestamp": written(delivery.created_at),
        "data": data,
    }
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
