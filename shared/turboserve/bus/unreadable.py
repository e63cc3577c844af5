"""Messages that a reader skips: of another MAJOR schema version, or with invalid contents."""

from __future__ import annotations

from pydantic import ValidationError

from turboserve import logs
from turboserve.contracts.versions import SchemaVersionError
from turboserve.telemetry import meter

log = logs.get("bus")

UNREADABLE = (SchemaVersionError, ValidationError)
"""What parsing a message raises."""

_skipped = meter("bus").create_counter(
    "turboserve_bus_skipped_messages",
    description="Received messages that were not read, by the first token of their subject and by reason: "
    "`version` (another MAJOR schema version) or `content`.",
)


def skip(subject: str, error: ValueError) -> None:
    """Count and log a message on `subject` whose parsing raised one of `UNREADABLE`."""
    kind = subject.removeprefix("live.").partition(".")[0]
    reason = "version" if isinstance(error, SchemaVersionError) else "content"
    _skipped.add(1, {"kind": kind, "reason": reason})
    log.warning("unreadable message", subject=subject, reason=reason, error=str(error))
