"""The configurations that a worker may choose for a chunk, from the best to the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_profile import (
    LEAST_SHARE,
    FidelityProfile,
    forward_seconds,
    forward_shares,
    pareto_frontier,
)
from turboserve.worker.engine.profile_file import InvalidProfileError
from turboserve.worker.model.config import ModelConfig

CHANGE = 1.1
"""Factor on the loss of a chunk whose session's newest chunk was better: of two equal sessions, the one that
is lowered already stays so."""


@dataclass(frozen=True)
class Rung:
    """One configuration, with its cost and its quality."""

    fidelity: Fidelity
    forwards: float
    """Time of a chunk, as a number of forwards at the best configuration. A row of a batch leaves the batch
    after so many of them."""
    quality: float
    """Quality relative to the best configuration's, 0 to 1."""
    forward_share: float | None = None
    """Time of one of its forwards, relative to one at the best configuration. None: not measured."""


@dataclass(frozen=True)
class FidelityLadder:
    """Configurations in order: each is faster than the one before, and not better."""

    rungs: tuple[Rung, ...]
    """At least one. The first is the best configuration."""
    floor: float = 1.0
    """Least quality of a chunk, relative to the best configuration's."""
    forward: float | None = None
    """Time of a forward, relative to a chunk, both at the best configuration. None: not measured. Forwards
    then count as all of a chunk's time."""

    def __post_init__(self) -> None:
        if not self.rungs:
            raise ValueError("rungs: at least one is needed")
        for above, below in zip(self.rungs, self.rungs[1:], strict=False):
            if below.forwards >= above.forwards or below.quality > above.quality:
                raise ValueError(
                    f"rungs: {below.fidelity.label} must be faster and not better than the one before"
                )

    @classmethod
    def of_best(cls, config: ModelConfig) -> FidelityLadder:
        """The ladder of a worker that lowers no quality."""
        return cls((Rung(Fidelity.best(config), config.chunk_forwards, 1.0),))

    @classmethod
    def of_profile(
        cls, profile: FidelityProfile, config: ModelConfig, floor: float | None = None
    ) -> FidelityLadder:
        """The ladder of a measured model. `floor`: least quality, relative; None: the profile's.

        Configurations that are not faster than the best one, or that another dominates, are left out. Raises
        `InvalidProfileError` if the file lacks the best configuration.
        """
        wanted = Fidelity.best(config)
        best = next((each for each in profile.measured if each.fidelity == wanted), None)
        if best is None or best.quality <= 0:
            raise InvalidProfileError(
                f"configurations: {wanted.label} must be among them, with a quality above 0"
            )
        faster = [each for each in profile.measured if each.seconds < best.seconds]
        shares = forward_shares(profile.measured, wanted)
        rungs = [Rung(wanted, config.chunk_forwards, 1.0)]
        for each in reversed(pareto_frontier(faster)):
            quality = min(1.0, each.quality / best.quality)
            forwards, share = config.chunk_forwards * each.seconds / best.seconds, shares.get(each.fidelity)
            rung = Rung(each.fidelity, forwards, quality, share)
            if len(rungs) > 1 and rungs[-1].quality == quality:
                # Both are as good as the best configuration: keep the faster one.
                rungs.pop()
            rungs.append(rung)
        least = min(1.0, profile.floor / best.quality) if floor is None else floor
        forward_s = forward_seconds(profile.measured, wanted)
        return cls(tuple(rungs), least, None if forward_s is None else forward_s / best.seconds)

    @property
    def best(self) -> Rung:
        """The configuration for which the model was made."""
        return self.rungs[0]

    def lowest(self, floor: float | None, pinned: bool) -> int:
        """Place of the fastest configuration that a session with these limits may get.

        `floor` and `pinned`: see `SessionSpec`. The ladder's own floor counts in any case.
        """
        least = self.floor if floor is None else max(floor, self.floor)
        return 0 if pinned else max(i for i, rung in enumerate(self.rungs) if i == 0 or rung.quality >= least)

    def place(self, fidelity: Fidelity | None) -> int | None:
        """Place of a configuration. None: it is not on the ladder."""
        return 0 if fidelity is None else self._places.get(fidelity)

    def quality(self, fidelity: Fidelity | None) -> float | None:
        """Relative quality of a configuration. None: it is not on the ladder."""
        place = self.place(fidelity)
        return None if place is None else self.rungs[place].quality

    def forward_share(self, fidelity: Fidelity | None) -> float | None:
        """Time of a forward, relative to one at the best configuration. None: not known.

        Fewer steps alone do not change a forward.
        """
        if fidelity is None or replace(fidelity, steps=self.best.fidelity.steps) == self.best.fidelity:
            return 1.0
        place = self.place(fidelity)
        return None if place is None else self.rungs[place].forward_share

    def chunk_share(
        self,
        fidelity: Fidelity | None,
        others: Sequence[Fidelity | None],
        *,
        cleans: bool = True,
        decodes: bool = True,
    ) -> float | None:
        """Time of a chunk, relative to one at the best configuration among as many sessions. None: not known.

        `others`: configurations of the other sessions. A forward takes the mean of its rows' shares. Where
        one forward stands for a whole chunk, as on most virtual devices, nothing is known. `cleans`: whether
        the time contains the last forward, over clean latents. `decodes`: whether it contains the decoding.
        """
        place = self.place(fidelity)
        rows = [share for each in (fidelity, *others) if (share := self.forward_share(each)) is not None]
        forward = 1 / self.best.forwards if self.forward is None else self.forward
        if place is None or len(rows) <= len(others) or forward >= 1:
            return None

        def seconds(rung: Rung, own: float, mean: float) -> float:
            steps = rung.fidelity.steps
            rest = rung.forwards / self.best.forwards - (steps + 1) * own * forward
            return decodes * rest + (steps + cleans) * forward * mean

        share = seconds(self.rungs[place], rows[0], sum(rows) / len(rows)) / seconds(self.best, 1.0, 1.0)
        return share if share >= LEAST_SHARE else None

    def step_down(self, place: int, lowest: int) -> tuple[int, float]:
        """The place below `place`, not below `lowest`, that loses the least quality for the time it wins.

        Of several, the lowest: steps along the upper hull of the ladder. Returns also the quality lost for
        each forward won.
        """
        key = place, lowest
        if key not in self._steps:
            losses = [(self._loss(place, below), -below) for below in range(place + 1, lowest + 1)]
            lost, below = min(losses)
            self._steps[key] = -below, lost
        return self._steps[key]

    def _loss(self, place: int, below: int) -> float:
        above, rung = self.rungs[place], self.rungs[below]
        return (above.quality - rung.quality) / (above.forwards - rung.forwards)

    @cached_property
    def steps(self) -> StepTable:
        """All steps down, for many chunks at once."""
        return StepTable.of(self)

    @cached_property
    def _steps(self) -> dict[tuple[int, int], tuple[int, float]]:
        return {}

    @cached_property
    def _places(self) -> dict[Fidelity, int]:
        return {rung.fidelity: place for place, rung in enumerate(self.rungs)}


@dataclass(frozen=True)
class StepTable:
    """The ladder's costs and its steps down (`FidelityLadder.step_down`) as arrays."""

    forwards: NDArray[np.float64]
    """By place."""
    below: NDArray[np.int64]
    """By lowest place and place: the place after a step down, or the place itself at and below the lowest."""
    rank: NDArray[np.int64]
    """By lowest place, newest place and place: number of the step down in the order of what it loses. Equal
    losses have equal numbers. The newest place is that of the session's chunk before: see `CHANGE`. It is the
    number of rungs for a chunk that is no next chunk."""

    @classmethod
    def of(cls, ladder: FidelityLadder) -> StepTable:
        """The table of this ladder."""
        count = len(ladder.rungs)
        below = np.tile(np.arange(count), (count, 1))
        lost = np.zeros((count, count))
        for lowest in range(count):
            for place in range(lowest):
                below[lowest, place], lost[lowest, place] = ladder.step_down(place, lowest)
        changes = below[:, None, :] > np.arange(count + 1)[None, :, None]
        losses = np.where(changes, (lost * CHANGE)[:, None, :], lost[:, None, :])
        rank = np.unique(losses, return_inverse=True)[1].reshape(losses.shape)
        return cls(np.array([rung.forwards for rung in ladder.rungs]), below, rank)
