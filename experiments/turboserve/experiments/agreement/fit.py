"""Constants of the real stack from one of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from turboserve.bench.paced.model import CONFIG
from turboserve.experiments.agreement.declared import Constants

Simulate = Callable[[Constants], Mapping[str, Any]]


def fitted(real: Mapping[str, Any], simulate: Simulate, title: str) -> Constants:
    """Return the constants with which the simulation starts workers, and generates chunks, as slowly.

    The start of a worker counts up to its first report. The chunks are those with the fewest others beside
    them, at the tenth percentile: the median also depends on which sessions meet. `title`: of the real run.
    """
    known = replace(Constants(), fitted_on=title)
    first = simulate(known)
    if real["start_s"] is not None and first["start_s"] is not None:
        start_s = max(0.0, known.start_s + real["start_s"] - first["start_s"])
        known = replace(known, start_s=round(start_s, 3))
    if None in (real["p10_s"], first["p10_s"]) or real["p10_s"] <= first["p10_s"]:
        return known
    extra_s = (real["p10_s"] - first["p10_s"]) / CONFIG.chunk_forwards
    second = simulate(replace(known, forward_extra_s=extra_s))
    if second["p10_s"] > first["p10_s"]:
        # Slower forwards also meet more often.
        extra_s *= (real["p10_s"] - first["p10_s"]) / (second["p10_s"] - first["p10_s"])
    return replace(known, forward_extra_s=round(extra_s, 6))
