"""Whether the log can store further video, by this instance's own appends and by the room left."""

from __future__ import annotations

from turboserve.contracts.canaries import SpaceLevel
from turboserve.contracts.errors import LogUnavailableError
from turboserve.state_store.publish.canaries import Canaries
from turboserve.state_store.settings import Settings


class LogStatus:
    """The state of the log, for admission."""

    def __init__(self, canaries: Canaries, settings: Settings) -> None:
        self._canaries, self._retry_s = canaries, settings.admission_retry_s

    @property
    def level(self) -> SpaceLevel:
        return self._canaries.space

    def require(self) -> None:
        """Raise LogUnavailableError while the log could not store the video of another session."""
        for stream, reason in self._canaries.refused_by().items():
            raise LogUnavailableError(
                f"the stream {stream} accepts no appends: {reason}",
                field=stream,
                retry_after_s=self._retry_s,
            )
        if self.level is SpaceLevel.FULL:
            raise LogUnavailableError(
                "the log has no room for another session", field="log_space", retry_after_s=self._retry_s
            )
