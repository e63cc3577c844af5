"""What goes wrong in one run: drawn from its seed, so that every run has a climate of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, or rates per second and target."""

    delay_s: float = 0.004
    """Mean of every message's delay; each has its own, so messages overtake each other."""
    lag_s: float = 0.004
    """Mean delay of an entry of a log to its readers; entries of one subject keep their order."""
    lost_hint: float = 0.0
    doubled_hint: float = 0.0
    lost_request: float = 0.0
    lost_answer: float = 0.0
    late_request: float = 0.0
    """A request that takes effect after its sender has given it up."""
    crash_step: Mapping[str, float] = field(default_factory=dict)
    """By service, for each of its callbacks: killed just before it."""
    crash: Mapping[str, float] = field(default_factory=dict)
    """By service, per second."""
    freeze: Mapping[str, float] = field(default_factory=dict)
    """By service, per second: stopped for a while, and going on as if nothing had been."""
    cut: Mapping[str, float] = field(default_factory=dict)
    """By service, per second: cut off from the broker for a while."""
    mute: float = 0.0
    """Per second and worker: its appends arrive and their acknowledgements do not, for a while."""
    broker_down: float = 0.0
    """Per second, as the rates below it."""
    broker_freeze: float = 0.0
    broker_slow: float = 0.0
    fresh_streams: float = 0.0
    """The broker comes back on another disk, without its streams."""
    disk_full: float = 0.0
    """The broker's disk takes no appends for a while."""
    postgres_down: float = 0.0
    postgres_freeze: float = 0.0
    postgres_slow: float = 0.0
    postgres_full: float = 0.0
    """The disk of Postgres is full for a while."""
    commit_in_doubt: float = 0.0
    """A commit whose connection breaks: it is done or not, and its sender cannot know."""
    hot_lost: float = 0.0
    """The hot store comes back empty."""
    hot_freeze: float = 0.0
    hot_slow: float = 0.0
    skew_s: float = 0.0
    """Wall clocks of hosts are off by up to this much, either way."""
    provider_fails: float = 0.0
    crash_at_start: float = 0.0
    never_ready: float = 0.0
    device_lost: float = 0.0
    """Per second and worker: its device fails, and the worker ends with a goodbye."""
    new_weights: float = 0.0
    """Per second: workers have another checkpoint from now on, and those that live are replaced."""
    host_full: float = 0.0
    """A suspension finds no room on the host."""
    transfer_fails: float = 0.0
    """Each step of a transfer between workers: it fails, or (half the time) says nothing any more."""


CALM = Faults()
SERVICES = ("state-store", "scheduler", "autoscaler", "gateway")
PROCESSES = (*SERVICES, "worker")


def draw(random: random.Random) -> Faults:
    """A climate: each kind of fault is there or not, and often or rarely."""

    def maybe(*values: float, share: float = 0.45) -> float:
        chosen, there = random.choice(values), random.random() < share
        return chosen if there else 0.0

    def each(kinds: tuple[str, ...], *values: float, share: float = 0.35) -> dict[str, float]:
        return {kind: rate for kind in kinds if (rate := maybe(*values, share=share)) > 0.0}

    return Faults(
        delay_s=random.choice((0.002, 0.02, 0.2)),
        lag_s=random.choice((0.002, 0.05, 0.8)),
        lost_hint=maybe(0.05, 0.3, 1.0),
        doubled_hint=maybe(0.1, 0.5),
        lost_request=maybe(0.02, 0.15),
        lost_answer=maybe(0.02, 0.15),
        late_request=maybe(0.02, 0.1),
        crash_step=each(PROCESSES, 0.00005, 0.0003, share=0.25),
        crash=each(PROCESSES, 0.02, 0.1),
        freeze=each(PROCESSES, 0.02, 0.08),
        cut=each(PROCESSES, 0.02, 0.08),
        mute=maybe(0.01, 0.04, share=0.3),
        broker_down=maybe(0.02, 0.06, share=0.3),
        broker_freeze=maybe(0.02, 0.05, share=0.2),
        broker_slow=maybe(0.02, 0.05, share=0.2),
        fresh_streams=maybe(0.02, share=0.1),
        disk_full=maybe(0.02, 0.05, share=0.15),
        postgres_down=maybe(0.02, 0.08, share=0.3),
        postgres_freeze=maybe(0.02, 0.05, share=0.2),
        postgres_slow=maybe(0.02, 0.05, share=0.2),
        postgres_full=maybe(0.02, share=0.1),
        commit_in_doubt=maybe(0.02, 0.1, share=0.3),
        hot_lost=maybe(0.05, 0.2, share=0.3),
        skew_s=maybe(0.5, 5.0, 60.0, share=0.3),
        provider_fails=maybe(0.1, 0.3, share=0.3),
        crash_at_start=maybe(0.1, 0.4, share=0.3),
        never_ready=maybe(0.1, 0.3, share=0.2),
        host_full=maybe(0.2, 0.6, share=0.3),
        transfer_fails=maybe(0.05, 0.3),
        hot_freeze=maybe(0.02, 0.05, share=0.2),
        hot_slow=maybe(0.02, 0.05, share=0.2),
        device_lost=maybe(0.01, 0.04, share=0.25),
        new_weights=maybe(0.02, 0.06, share=0.25),
    )
