"""A control between its arrival and the chunk boundary at which it takes effect."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from turboserve.worker.engine.interface import Control, Step


@dataclass
class PendingControl:
    """A control that waits for a chunk boundary, and its embedding once it is computed."""

    control: Control
    text: Tensor | None = None
    encoded: Step | None = None
    """The batch that encoded it, if the engine records it."""
    elsewhere: bool = False
    """Whether another worker encodes it."""
    asked: bool = False
    """Whether other workers were asked: without an embedding, it is encoded here."""

    @property
    def ready(self) -> bool:
        """Whether the control waits for nothing but the boundary."""
        return self.text is not None or not self.changes_text

    @property
    def changes_text(self) -> bool:
        """Whether the control sets what the text encoder encodes: the prompt or the values."""
        return self.control.prompt is not None or self.control.values is not None
