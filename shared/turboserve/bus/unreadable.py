"""Messages that a reader skips: of another MAJOR schema version, or with invalid contents."""

from __future__ import annotations

from pydantic import ValidationError

from turboserve import logs
from turboserve.contracts.versions import SchemaVersionError
from turboserve.instruments import Instruments
from turboserve.telemetry_names import MESSAGE, REASON

log = logs.get("bus")

UNREADABLE = (SchemaVersionError, ValidationError)
"""What parsing a message raises."""

_skipped = Instruments("bus").counter(
    "turboserve.bus.messages.skipped",
    "{message}",
    "Received messages that were not read, by reason: `version` (another MAJOR schema version) or `content`.",
    MESSAGE,
    REASON,
)


def skip(subject: str, error: ValueError) -> None:
    """Count and log a message on `subject` whose parsing raised one of `UNREADABLE`."""
    kind = subject.removeprefix("live.").partition(".")[0]
    reason = "version" if isinstance(error, SchemaVersionError) else "content"
    _skipped.add(1, {MESSAGE: kind, REASON: reason})
    log.warning("unreadable message", subject=subject, reason=reason, error=str(error))
