"""Errors of packaging."""

from __future__ import annotations

from turboserve.contracts.errors import TurboServeError


class FrameFormatError(TurboServeError):
    """Frames of a shape, type or rate that cannot be packaged. The same frames fail again."""

    code, status, title = "frame_format", 422, "Frames cannot be packaged"
