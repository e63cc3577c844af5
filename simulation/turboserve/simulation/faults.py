"""The faults of one run, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Faults:
    """Faults as probabilities per message, or as rates per second and target."""

    delay_s: float = 0.004
    """Mean delay of a message. Delays are independent, so messages overtake each other."""
    lag_s: float = 0.004
    """Mean delay of a log entry to its readers. Entries of one subject keep their order."""
    lost_hint: float = 0.0
    doubled_hint: float = 0.0
    lost_request: float = 0.0
    lost_answer: float = 0.0
    late_request: float = 0.0
    """Probability that a request takes effect after its sender has given it up."""
    crash_step: Mapping[str, float] = field(default_factory=dict)
    """By service: probability, for each of its callbacks, that the process is killed just before it."""
    crash: Mapping[str, float] = field(default_factory=dict)
    """By service: kills per second."""
    freeze: Mapping[str, float] = field(default_factory=dict)
    """By service: freezes per second. A frozen process later continues without noticing."""
    cut: Mapping[str, float] = field(default_factory=dict)
    """By service, per second: disconnections from the broker, for a while."""
    mute: float = 0.0
    """Per second and worker: periods in which its appends arrive and the acknowledgements do not."""
    broker_down: float = 0.0
    """Stops of the broker per second. The unit also applies to the rates below."""
    broker_freeze: float = 0.0
    broker_slow: float = 0.0
    fresh_streams: float = 0.0
    """The broker restarts on another disk, without its streams."""
    lost_tail: float = 0.0
    """The broker's machine loses power: the broker restarts without what it stored last."""
    disk_full: float = 0.0
    """The broker's disk accepts no appends for a while."""
    postgres_down: float = 0.0
    postgres_freeze: float = 0.0
    postgres_slow: float = 0.0
    postgres_full: float = 0.0
    """The disk of Postgres is full for a while."""
    commit_in_doubt: float = 0.0
    """Probability that the connection breaks during a commit, so that its sender cannot know the outcome."""
    hot_lost: float = 0.0
    """The hot store restarts empty."""
    hot_freeze: float = 0.0
    hot_slow: float = 0.0
    skew_s: float = 0.0
    """Maximum error of the hosts' wall clocks, in seconds, in either direction."""
    provider_fails: float = 0.0
    crash_at_start: float = 0.0
    never_ready: float = 0.0
    device_lost: float = 0.0
    """Per second and worker: its device fails, and the worker leaves with a message."""
    new_weights: float = 0.0
    """Per second: new workers load another checkpoint from then on, and living workers are replaced."""
    host_full: float = 0.0
    """Probability that a suspension finds no room on the host."""
    isolated: Mapping[str, float] = field(default_factory=dict)
    """By service, per second: periods in which its connections to other workers carry nothing."""
    slow_device: Mapping[str, float] = field(default_factory=dict)
    """By service, per second: periods in which its device is slow."""
    device_lost_of: Mapping[str, float] = field(default_factory=dict)
    """By service other than `worker`, per second: its device fails."""
    transfer_fails: float = 0.0
    """Probability that a step of a transfer between workers fails, or (half the time) hangs."""
    loan_breaks: float = 0.0
    """Probability, for each forward of two workers together, that one of them dies or freezes within it."""
    loan_stutters: float = 0.0
    """Probability, for each such forward, that the home pauses again and again within it, each time for less
    than an exchange may take."""


CALM = Faults()
SERVICES = ("state-store", "scheduler", "autoscaler", "gateway")
PROCESSES = (*SERVICES, "worker")


def draw(random: random.Random) -> Faults:
    """Draw the faults of one run: each kind is absent or present, frequent or rare."""

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
        lost_tail=maybe(0.02, 0.06, share=0.15),
        loan_breaks=maybe(0.02, 0.2, share=0.6),
        loan_stutters=maybe(0.05, 0.5),
    )
