"""Sessions with real arrivals: one hour of a production trace, at several time scales."""

from __future__ import annotations

import csv
import gzip
import random
from importlib import resources

from turboserve.autoscaler.control.events import SessionChange
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked, since

FILE = "data/azure_llm_conv_2023.csv.gz"
"""Azure Public Dataset, AzureLLMInferenceTrace_conv, CC BY 4.0."""
STAY_S = 150.0
"""Mean stay: Little's law on the paper's traces gives 2 to 4 minutes."""
KEPT_PER_STRETCH = 16
"""Stretch × thinning. It gives every time scale about the same number of concurrent sessions (50)."""
SCALES = (1, 4, 16)


def arrivals() -> list[tuple[float, int]]:
    """Return (seconds since the first request, generated tokens) of every request."""
    packed = resources.files("turboserve.experiments.autoscale").joinpath(FILE).read_bytes()
    rows = csv.DictReader(gzip.decompress(packed).decode().splitlines())
    return [(float(row["time_s"]), int(row["generated_tokens"])) for row in rows]


def azure(stretch: int, lasts_s: float = 3600.0) -> WorkloadTrace:
    """Return the first `lasts_s` of the arrivals, `stretch` times slower, every (16 / stretch)-th kept.

    A session stays in proportion to the request's generated tokens, times a log-normal factor (σ 1), which is
    heavy tailed. A session that stays longer than a minute idles once, for a fifth of its stay. The first two
    mean stays are left out, so that the system is not empty at 0.
    """
    source = random.Random(f"azure {stretch}")
    rows = arrivals()
    mean = sum(tokens for _, tokens in rows) / len(rows)
    steps: list[Step] = []
    for number, (at, tokens) in enumerate(rows[:: KEPT_PER_STRETCH // stretch]):
        begins_s = at * stretch - 2 * STAY_S
        stay_s = STAY_S * tokens / mean * source.lognormvariate(-0.5, 1.0)
        name = f"s{number:05d}"
        steps.append(Step(begins_s, name, SessionChange.ARRIVAL))
        if stay_s > 60.0:
            steps.append(Step(begins_s + 0.4 * stay_s, name, SessionChange.IDLING))
            steps.append(Step(begins_s + 0.6 * stay_s, name, SessionChange.ACTIVATION))
        steps.append(Step(begins_s + stay_s, name, SessionChange.DEPARTURE))
    steps.sort(key=lambda step: (step.at, step.session))
    return checked(f"azure x{stretch}", since(steps, 0.0, lasts_s), lasts_s)
