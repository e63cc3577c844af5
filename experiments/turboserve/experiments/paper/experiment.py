"""What every experiment of the paper's evaluation offers, and at which size it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turboserve.experiments.paper.profiles import QUICK_START_UPS, START_UPS
from turboserve.experiments.result_folder import PaperCell

DRAWS, QUICK_DRAWS = 10, 2


@dataclass(frozen=True)
class Scale:
    """Size of a run."""

    quick: bool = False
    draws: int = 0
    """Number of draws of each trace. 0: by size."""
    first_seed: int = 0

    @property
    def seeds(self) -> range:
        count = self.draws or (QUICK_DRAWS if self.quick else DRAWS)
        return range(self.first_seed, self.first_seed + count)

    @property
    def start_ups(self) -> Sequence[float]:
        return QUICK_START_UPS if self.quick else START_UPS


class Experiment(Protocol):
    """One module of this package for each table or figure."""

    NAME: str

    def cells(self, scale: Scale) -> list[PaperCell]:
        """Return the runs of the experiment."""
        ...

    def report(self, scale: Scale, results: Mapping[PaperCell, Any]) -> dict[str, Any]:
        """Return `paper`, `ours`, `interval`, `ratio`, `wanted`, `met` and `declared`."""
        ...

    def rows(self, report_: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """Return (what, paper, ours) for the terminal."""
        ...
