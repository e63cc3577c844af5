"""A file of measured latency profiles: `turboserve profile engine` writes it, and a worker starts with it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VERSION = 1
STAGES = ("text", "recache", "forward", "decode", "package")
"""Stages in the order of the pipeline; `forward` is one denoising forward."""


class InvalidProfileError(ValueError):
    """A profile file cannot be used. The message names the field and its allowed values. Do not retry."""


class ForeignProfileError(InvalidProfileError):
    """A profile file is of another model, device or kind of attention. Do not retry."""


@dataclass(frozen=True)
class ProfileFile:
    """L(b) of every stage of one model on one kind of device."""

    model: str
    """Fingerprint of the model's configuration."""
    device: str
    """Type of the device: cpu or cuda."""
    stages: Mapping[str, Mapping[int, float]]
    """Seconds by batch size, by stage."""

    def write(self, path: Path) -> None:
        """Write as JSON. Raises `OSError`."""
        stages = {stage: {str(b): s for b, s in seconds.items()} for stage, seconds in self.stages.items()}
        value = {"version": VERSION, "model": self.model, "device": self.device, "stages": stages}
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(value, indent=2) + "\n")
        new.replace(path)

    @classmethod
    def read(cls, path: Path, *, model: str, device: str) -> ProfileFile:
        """Read a file that must be of this model and device. Raises `InvalidProfileError`."""
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidProfileError(f"{path}: {error}") from error
        if not isinstance(value, dict):
            raise InvalidProfileError(f"{path}: not a JSON object")
        for field, wanted in (("version", VERSION), ("model", model), ("device", device)):
            if value.get(field) != wanted:
                raise InvalidProfileError(f"{path}: {field} is {value.get(field)!r}, must be {wanted!r}")
        stages = value.get("stages")
        if not isinstance(stages, dict) or not set(stages) <= set(STAGES):
            raise InvalidProfileError(
                f"{path}: stages: must be an object with keys among {', '.join(STAGES)}"
            )
        return cls(model, device, {stage: _latencies(path, stage, stages[stage]) for stage in stages})


def _latencies(path: Path, stage: str, value: object) -> dict[int, float]:
    wrong = InvalidProfileError(f"{path}: stages.{stage}: must be positive seconds by batch size from 1")
    if not isinstance(value, dict):
        raise wrong
    found: dict[int, float] = {}
    for size, seconds in value.items():
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not size.isdecimal() or int(size) < 1 or not number or not math.isfinite(seconds) or seconds <= 0:
            raise wrong
        found[int(size)] = float(seconds)
    return found
