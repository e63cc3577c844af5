"""The compared policies: what each sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from turboserve.plugins import NotInstalledError
from turboserve.scheduler.placement import PLACEMENTS
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.worker.engine.gather import ALPHA, GATHER_POLICIES
from turboserve.worker.settings import Settings as WorkerSettings

HOST_WORKERS = 8
"""Workers of one host, which may lend each other their devices: the GPUs of the paper's nodes."""
BOUNDARY_S = 0.01
"""Time for which a migrating session waits for a boundary after which its next chunk is not due."""
UNLIMITED_S = 1e6
"""Lead of a policy that lets sessions generate ahead without limit."""


@dataclass(frozen=True)
class SlackPolicy:
    """Settings of one row. A row whose settings do not exist is listed with the reason and never run."""

    meaning: str
    gather: str
    placement: str
    worker: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the workers' settings."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the schedulers' settings."""
    lends: bool = False
    """Whether workers of one host lend each other their devices (sequence parallelism of degree 2)."""

    @property
    def not_built(self) -> str | None:
        """Setting or policy that keeps the row from being run. None: nothing."""
        for kind, fields in ((WorkerSettings, self.worker), (SchedulerSettings, self.scheduler)):
            missing = sorted(set(fields) - set(kind.model_fields))
            if missing:
                return f"setting {missing[0]}"
            try:
                kind(**fields)
            except ValueError as error:
                return f"setting refused: {str(error).splitlines()[-2].strip()}"
        try:
            GATHER_POLICIES.check(self.gather)
            PLACEMENTS.check(self.placement)
        except NotInstalledError as error:
            return f"{error.kind} {error.name}"
        return None


_AHEAD = {
    "max_lead_s": UNLIMITED_S,
    # A session migrates at its next chunk boundary, as in SlackServe. As shipped, a worker looks up to 2 s
    # for a boundary after which the session can wait.
    "migration_idle_window_s": BOUNDARY_S,
    "migration_idle_window_timeout_s": BOUNDARY_S,
}
_FIXED = {"rebalance": False}
_REHOMING = {"rebalancer": "algorithm-1", "migration_cooldown_s": 60.0}
_RESCUE = {"rescue_horizon_s": 5.0, "migration_cooldown_s": 1.0}
"""Streams last 13 s on average: with the shipped rest of 30 s, each would migrate once."""
POLICIES: dict[str, SlackPolicy] = {
    "sdv2": SlackPolicy(
        "StreamDiffusionV2: first come, first served; fixed home; static configuration",
        "fcfs",
        "least-loaded",
        _AHEAD,
        _FIXED,
    ),
    "ts": SlackPolicy(
        "TridentServe: earliest deadline of a whole stream first, a whole chunk each; static configuration, "
        "SlackServe's re-homing, sequence parallelism",
        "stream-deadline",
        "fewest-streams",
        _AHEAD,
        _REHOMING,
        lends=True,
    ),
    "ts_chunk": SlackPolicy(
        "TridentServe by chunk: `ts_chunk_without_sp` with sequence parallelism",
        "tiers",
        "fewest-streams",
        _AHEAD,
        _REHOMING,
        lends=True,
    ),
    "ts_chunk_without_sp": SlackPolicy(
        # At one configuration all chunks take the same time, so tiers and then credit are the order of slack.
        "TridentServe by chunk without sequence parallelism: least slack first, static configuration, "
        "SlackServe's re-homing",
        "tiers",
        "fewest-streams",
        _AHEAD,
        _REHOMING,
    ),
    "credit_only": SlackPolicy(
        "SlackServe's queue alone: tiers, least credit first, preemption after each step",
        "tiers",
        "least-loaded",
        _AHEAD,
        _FIXED,
    ),
    "bmpr": SlackPolicy(
        "`credit_only` with SlackServe's choice of configurations (BMPR)",
        "tiers",
        "least-loaded",
        {**_AHEAD, "fidelity": "bmpr"},
        _FIXED,
    ),
    "fixed_level": SlackPolicy(
        "`credit_only` with a fast, a medium or the best configuration by tier",
        "tiers",
        "least-loaded",
        {**_AHEAD, "fidelity": "fixed-level"},
        _FIXED,
    ),
    "rehoming": SlackPolicy(
        "`bmpr` with SlackServe's re-homing (Algorithm 1): SlackServe without sequence parallelism",
        "tiers",
        "fewest-streams",
        {**_AHEAD, "fidelity": "bmpr"},
        _REHOMING,
    ),
    "slackserve": SlackPolicy(
        "SlackServe whole: `rehoming` with elastic sequence parallelism",
        "tiers",
        "fewest-streams",
        {**_AHEAD, "fidelity": "bmpr"},
        _REHOMING,
        lends=True,
    ),
    "turboserve": SlackPolicy(
        "Counts alone: K, min-max, migrations for balance, the best configuration",
        "step",
        "min-max",
        {"fidelity": "best"},
    ),
    "ours": SlackPolicy(
        "Least credit first, configurations by one feasibility test over the worker's sessions, migrations "
        "that save chunks",
        "step",
        "min-max",
        {**_AHEAD, "fidelity": "in-time"},
        _RESCUE,
    ),
    "ours_without_fidelity": SlackPolicy(
        "`ours` with the best configuration only", "step", "min-max", _AHEAD, _RESCUE
    ),
    "ours_without_rescue": SlackPolicy(
        "`ours` with migrations for balance only", "step", "min-max", {**_AHEAD, "fidelity": "in-time"}
    ),
    "ours_with_tiers": SlackPolicy(
        "`ours` with SlackServe's queue", "tiers", "min-max", {**_AHEAD, "fidelity": "in-time"}, _RESCUE
    ),
    "ours_with_sp": SlackPolicy(
        "`ours` with sequence parallelism",
        "step",
        "min-max",
        {**_AHEAD, "fidelity": "in-time"},
        _RESCUE,
        lends=True,
    ),
    "ours_without_all": SlackPolicy(
        "The shipped queue and balance, without K and without a limit of the lead", "step", "min-max", _AHEAD
    ),
}
"""Policies by the name of their row."""
ALPHAS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Widths of a tier, as a multiple of T."""
POLICIES |= {
    f"slackserve_alpha_{alpha:g}": replace(
        POLICIES["slackserve"],
        meaning=f"`slackserve` with tiers of α = {alpha:g}",
        worker={**POLICIES["slackserve"].worker, "tier_alpha": alpha},
        scheduler={**POLICIES["slackserve"].scheduler, "tier_alpha": alpha},
    )
    for alpha in ALPHAS
    if alpha != ALPHA
}
SAME_RUNS = {"slackserve_without_sp": "rehoming", f"slackserve_alpha_{ALPHA:g}": "slackserve"}
"""Rows that are another row's runs under their own name."""
POLICIES |= {name: POLICIES[other] for name, other in SAME_RUNS.items()}
MAIN = (
    "sdv2",
    "ts",
    "ts_chunk",
    "ts_chunk_without_sp",
    "credit_only",
    "bmpr",
    "rehoming",
    "slackserve",
    "slackserve_without_sp",
    "turboserve",
    "ours",
)
"""Rows of every workload. The others are rows of ablations only."""
ABLATIONS = (
    "credit_only",
    "fixed_level",
    "bmpr",
    "rehoming",
    "slackserve",
    "ours",
    "ours_without_fidelity",
    "ours_without_rescue",
    "ours_with_tiers",
    "ours_with_sp",
    "ours_without_all",
)
"""SlackServe's parts one after the other, then `ours` without one part each."""
SWEEP = tuple(f"slackserve_alpha_{alpha:g}" for alpha in ALPHAS)
"""Rows of the sweep of α."""
QUICK = (
    "sdv2",
    "ts",
    "ts_chunk",
    "credit_only",
    "bmpr",
    "rehoming",
    "slackserve",
    "turboserve",
    "ours",
)
"""Rows of every workload in a quick run."""
SIDE = ("sdv2", "ts", "ts_chunk", "slackserve", "turboserve", "ours")
"""Rows of rates, profiles, 64 workers and the highest load."""
COUNTED = frozenset({"turboserve"})
"""Policies whose workers offer K slots, as many as their profile keeps in real time."""
