"""A file of measured configurations, and the choice among them: `turboserve profile fidelity` writes it.

Source: SlackServe, 4.2 and Appendix B.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turboserve.worker.engine.errors import InvalidFidelityError
from turboserve.worker.engine.fidelity import AttentionName, Fidelity
from turboserve.worker.engine.profile_file import ForeignProfileError, InvalidProfileError
from turboserve.worker.model.config import ModelConfig

VERSION = 1
ROUNDED: AttentionName = "fp8"
"""The kind of attention that changes quality. Others differ in their last digits, and in latency."""
EXACT: AttentionName = "rows"

LEAST_SHARE = 0.05
"""Share of a forward's time below which the difference of two chunks is noise."""


@dataclass(frozen=True)
class MeasuredFidelity:
    """Latency and quality of one configuration."""

    fidelity: Fidelity
    seconds: float
    """Median time from the beginning of one chunk to that of the next, of a lone session, seconds: all
    forwards and the decoding, without packaging."""
    quality: float
    """Mean quality over the prompts, 0 to 1; greater is better."""
    interval: tuple[float, float]
    """95 % confidence interval of the quality."""


@dataclass(frozen=True)
class FidelityProfile:
    """All measured configurations of one model on one kind of device."""

    model: str
    """Fingerprint of the model's configuration."""
    device: str
    """Type of the device: cpu or cuda."""
    prompts: int
    """Number of prompts behind each quality."""
    measured: tuple[MeasuredFidelity, ...]
    attention: AttentionName = "rows"
    """Kind of attention with which latency and quality were measured."""

    @property
    def floor(self) -> float:
        """Least quality at which a chunk may be generated: the median of all measured (SlackServe)."""
        return statistics.median(each.quality for each in self.measured)

    @property
    def frontier(self) -> tuple[MeasuredFidelity, ...]:
        """The configurations that no other dominates, fastest first."""
        return pareto_frontier(self.measured)

    def without_fast_decoder(self) -> FidelityProfile:
        """The configurations for a worker that has one decoder."""
        kept = tuple(each for each in self.measured if not each.fidelity.fast_decoder)
        return replace(self, measured=kept)

    def write(self, path: Path) -> None:
        """Write as JSON, the frontier and the floor included. Raises `OSError`."""
        chosen = set(self.frontier)
        value = {
            "version": VERSION,
            "model": self.model,
            "device": self.device,
            "attention": self.attention,
            "prompts": self.prompts,
            "floor": self.floor,
            "configurations": [
                {
                    **each.fidelity.to_mapping(),
                    "seconds": each.seconds,
                    "quality": each.quality,
                    "interval": list(each.interval),
                    "frontier": each in chosen,
                }
                for each in self.measured
            ],
        }
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(value, indent=2) + "\n")
        new.replace(path)

    @classmethod
    def read(
        cls, path: Path, config: ModelConfig, *, model: str, device: str, attention: AttentionName = "rows"
    ) -> FidelityProfile:
        """Read a file. Raises `InvalidProfileError`; `ForeignProfileError` for another model or device, or if
        only one of the file and the worker rounds attention.

        The frontier and the floor are computed again: they are in the file for people. A file of an earlier
        version names no attention: it is taken for one that was measured with `rows`.
        """
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidProfileError(f"{path}: {error}") from error
        if not isinstance(value, dict):
            raise InvalidProfileError(f"{path}: not a JSON object")
        for field, wanted in (("version", VERSION), ("model", model), ("device", device)):
            if (found := value.get(field)) != wanted:
                wrong = InvalidProfileError if field == "version" else ForeignProfileError
                raise wrong(f"{path}: {field} is {found!r}, must be {wanted!r}")
        kind = value.get("attention", EXACT)
        if kind != attention and ROUNDED in (kind, attention):
            raise ForeignProfileError(f"{path}: attention is {kind!r}, must be {attention!r}")
        found = value.get("configurations")
        if not isinstance(found, list) or not found:
            raise InvalidProfileError(f"{path}: configurations: must be a list with at least one entry")
        prompts = value.get("prompts")
        if not isinstance(prompts, int) or isinstance(prompts, bool) or prompts < 1:
            raise InvalidProfileError(f"{path}: prompts: {prompts!r} must be a whole number from 1")
        measured = tuple(
            _measured(f"{path}: configurations[{place}]", each, config) for place, each in enumerate(found)
        )
        return cls(model, device, prompts, measured, attention)


def pareto_frontier(measured: Iterable[MeasuredFidelity]) -> tuple[MeasuredFidelity, ...]:
    """The configurations that no other dominates, fastest first.

    One dominates another if it is as fast and as good, and faster or better. Of several with equal latency
    and quality, one is kept.
    """
    frontier: list[MeasuredFidelity] = []
    for each in sorted(measured, key=lambda m: (m.seconds, -m.quality)):
        if not frontier or each.quality > frontier[-1].quality:
            frontier.append(each)
    return tuple(frontier)


def forward_seconds(measured: Iterable[MeasuredFidelity], best: Fidelity) -> float | None:
    """Time of a forward at the best configuration: of two whole chunks that differ in steps alone, and thus
    not in their decoding. None: such chunks were not measured."""
    seconds = {each.fidelity: each.seconds for each in measured}
    fewest = min(
        (each.steps for each in seconds if replace(each, steps=best.steps) == best), default=best.steps
    )
    if best not in seconds or fewest == best.steps:
        return None
    forward_s = (seconds[best] - seconds[replace(best, steps=fewest)]) / (best.steps - fewest)
    return forward_s if forward_s > 0 else None


def forward_shares(measured: Sequence[MeasuredFidelity], best: Fidelity) -> dict[Fidelity, float]:
    """Time of a forward at each configuration, relative to one at the best.

    Two chunks of equal steps and decoder tell what a forward at the one saves. A configuration without such a
    counterpart is left out.
    """
    seconds = {each.fidelity: each.seconds for each in measured}
    forward_s = forward_seconds(measured, best)
    shares: dict[Fidelity, float] = {}
    for each, taken_s in seconds.items():
        whole_s = seconds.get(replace(best, steps=each.steps, fast_decoder=each.fast_decoder))
        if whole_s is not None and forward_s is not None:
            share = 1 + (taken_s - whole_s) / ((each.steps + 1) * forward_s)
            if share >= LEAST_SHARE:
                shares[each] = share
    return shares


def choose_within_budget(
    frontier: Iterable[MeasuredFidelity], floor: float, budget_s: float
) -> MeasuredFidelity | None:
    """The best configuration that keeps the budget; if none does, the fastest (SlackServe's BMPR, 4.2).

    Configurations below `floor` are never chosen. None if all are below it.
    """
    allowed = [each for each in frontier if each.quality >= floor]
    in_time = [each for each in allowed if each.seconds <= budget_s]
    if in_time:
        return max(in_time, key=lambda each: each.quality)
    return min(allowed, key=lambda each: each.seconds, default=None)


def _measured(where: str, value: object, config: ModelConfig) -> MeasuredFidelity:
    if not isinstance(value, Mapping):
        raise InvalidProfileError(f"{where}: must be an object")
    low, high = _interval(where, value.get("interval"))
    return MeasuredFidelity(
        _fidelity(where, value, config),
        _number(f"{where}.seconds", value.get("seconds"), above=0.0),
        _number(f"{where}.quality", value.get("quality")),
        (low, high),
    )


def _fidelity(where: str, value: Mapping[str, Any], config: ModelConfig) -> Fidelity:
    for field in ("steps", "window_chunks"):
        if not isinstance(value.get(field), int) or isinstance(value.get(field), bool):
            raise InvalidProfileError(f"{where}.{field}: {value.get(field)!r} must be a whole number")
    sparsity = _number(f"{where}.sparsity", value.get("sparsity"))
    try:
        fast = value.get("fast_decoder", False)
        return Fidelity(value["steps"], value["window_chunks"], sparsity, fast).check(config)
    except InvalidFidelityError as error:
        raise InvalidProfileError(f"{where}: {error}") from error


def _interval(where: str, value: object) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidProfileError(f"{where}.interval: must be two numbers, the lower first")
    low, high = (_number(f"{where}.interval", each) for each in value)
    if low > high:
        raise InvalidProfileError(f"{where}.interval: {low} is above {high}")
    return low, high


def _number(where: str, value: object, above: float = -math.inf) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf:
        return float(value)
    limit = f" above {above:g}" if math.isfinite(above) else ""
    raise InvalidProfileError(f"{where}: {value!r} must be a finite number{limit}")
