"""NeuStream's gather policies: partial deadlines, and the earliest finish in fluid sharing."""

from __future__ import annotations

from turboserve.baselines.neustream import EarliestFluidFinish, PartialDeadlines
from turboserve.worker.engine.gather import Candidate, GatherPolicy, LatencyProfile

STEPS = 5
LINEAR = LatencyProfile({1: 0.02, 16: 0.32})
FLAT = LatencyProfile({1: 0.02, 16: 0.03})


def candidate(name: str, step: int = 0, waiting_s: float = 0.0, slack_s: float = 1.0) -> Candidate:
    return Candidate(name, 3, step, STEPS - step, waiting_s, slack_s, slack_s)


def names(policy: GatherPolicy, ready: list[Candidate], profile: LatencyProfile, limit: int) -> list[str]:
    return [one.session for one in policy.gather(ready, profile, limit)]


def test_a_batch_ends_within_the_least_partial_slo_of_its_rows() -> None:
    policy = PartialDeadlines()
    # 1 s for five forwards: 0.2 s each, in which ten rows of 0.02 s end.
    plenty = [candidate(f"s{number:02}") for number in range(16)]
    assert len(names(policy, plenty, LINEAR, 16)) == 10
    # One with 0.25 s for its five has 0.05 s for each. The first to come sets the size.
    urgent = candidate("urgent", waiting_s=0.04, slack_s=0.21)
    assert names(policy, [*plenty, urgent], LINEAR, 16) == ["urgent", "s00"]
    # One that would make the batch too late for itself is left out, and the others are not.
    late = candidate("late", slack_s=0.06)
    assert names(policy, [plenty[0], late, plenty[1]], LINEAR, 16) == ["s00", "s01"]


def test_what_has_used_up_its_budget_waits_for_the_others() -> None:
    policy = PartialDeadlines()
    # Its first forward should have ended 0.1 s ago: a fifth of 0.5 s, after 0.2 s.
    behind = candidate("behind", waiting_s=0.2, slack_s=0.3)
    assert names(policy, [behind, candidate("a")], FLAT, 8) == ["a"]
    # It is not dropped.
    assert names(policy, [behind], FLAT, 8) == ["behind"]
    late = candidate("late", waiting_s=3.0, slack_s=-1.0)
    assert names(policy, [behind, late], FLAT, 8) == ["late", "behind"]


def test_the_earliest_finish_in_fluid_sharing_runs_first() -> None:
    policy = EarliestFluidFinish()
    # Three sessions share the device: a forward takes 0.06 s. The third one of `begun` ends 0.18 s after its
    # chunk became due, the first one of the others after 0.06 s.
    begun = candidate("begun", step=2, waiting_s=0.1)
    ready = [begun, candidate("new"), candidate("waits", waiting_s=0.05)]
    assert names(policy, ready, LINEAR, 1) == ["waits"]
    assert names(policy, ready, FLAT, 8) == ["waits", "new", "begun"]
    # After a longer wait it would have ended before them.
    assert names(policy, [candidate("begun", step=2, waiting_s=0.2), *ready[1:]], LINEAR, 1) == ["begun"]
