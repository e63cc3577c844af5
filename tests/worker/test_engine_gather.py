"""Gather policies, profiles, budgets: pure parts of the engine, over many cases."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.worker.engine.budget import MemoryBudget
from turboserve.worker.engine.errors import BudgetTooSmallError, SlabsExhaustedError
from turboserve.worker.engine.gather import (
    GATHER_POLICIES,
    Candidate,
    GatherPolicy,
    LatencyProfile,
    LeastCreditFirst,
)
from turboserve.worker.engine.memory import Slab, SlabLayout, SlabPool

AGING = ("fcfs", "chunk", "step")
"""Policies that count how long a session waits. `tiers` relies on credit, which falls with time."""
POLICIES = (*AGING, "tiers", "stream-deadline", "partial-deadlines", "earliest-fluid-finish")
FLAT = LatencyProfile({1: 0.02, 16: 0.03})
LINEAR = LatencyProfile({1: 0.02, 16: 0.32})
STEPS = 5


def candidate(name: str, **values: float | bool) -> Candidate:
    defaults: dict[str, float | bool] = {
        "frames": 3, "step": 0, "steps_left": STEPS, "waiting_s": 0.0, "slack_s": 10.0, "credit_s": 5.0
    }  # fmt: skip
    return Candidate(name, **{**defaults, **values})  # type: ignore[arg-type]


@st.composite
def ready_sets(draw: st.DrawFn) -> list[Candidate]:
    count = draw(st.integers(0, 12))
    made = []
    for i in range(count):
        step = draw(st.integers(0, STEPS - 1))
        made.append(
            candidate(
                f"s{i}",
                frames=draw(st.sampled_from((3, 3, 3, 9))),
                step=step,
                steps_left=STEPS - step,
                waiting_s=draw(st.floats(0, 5)),
                slack_s=draw(st.floats(-1, 5)),
                credit_s=draw(st.floats(-3, 5)),
                begins=draw(st.booleans()),
            )
        )
    return made


@settings(max_examples=100, deadline=None)
@given(ready_sets(), st.sampled_from(POLICIES), st.sampled_from((FLAT, LINEAR)), st.integers(1, 6))
def test_every_batch_respects_the_contract(
    ready: list[Candidate], name: str, profile: LatencyProfile, limit: int
) -> None:
    batch = GATHER_POLICIES.make(name).gather(ready, profile, limit)
    assert bool(batch) == bool(ready)
    assert len(batch) <= limit
    assert len({c.session for c in batch}) == len(batch)
    assert all(c in ready for c in batch)
    assert len({(c.frames, c.begins) for c in batch}) <= 1


class Queue:
    """Sessions that request a chunk again as soon as they have one, on a virtual clock."""

    def __init__(
        self, slacks: list[float], gather: GatherPolicy, profile: LatencyProfile, limit: int
    ) -> None:
        self.slacks, self.gather, self.profile, self.limit = slacks, gather, profile, limit
        self.now = 0.0
        self.step = [0] * len(slacks)
        self.due = [0.0] * len(slacks)
        self.made = [0] * len(slacks)
        self.longest = [0.0] * len(slacks)

    def turn(self) -> None:
        ready = [
            candidate(
                str(i), step=self.step[i], steps_left=STEPS - self.step[i], waiting_s=self.now - self.due[i],
                slack_s=slack, credit_s=slack - self.profile(1) * (STEPS - self.step[i]),
            )
            for i, slack in enumerate(self.slacks)
        ]  # fmt: skip
        batch = self.gather.gather(ready, self.profile, self.limit)
        self.now += self.profile(len(batch))
        for chosen in batch:
            i = int(chosen.session)
            self.step[i] += 1
            if self.step[i] == STEPS:
                self.longest[i] = max(self.longest[i], self.now - self.due[i])
                self.made[i], self.step[i], self.due[i] = self.made[i] + 1, 0, self.now


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-2, 30), min_size=1, max_size=8),
    st.sampled_from(AGING),
    st.sampled_from((LatencyProfile({1: 0.2, 16: 0.3}), LatencyProfile({1: 0.2, 16: 3.2}))),
    st.integers(1, 8),
)
def test_no_session_starves_however_unequal_the_slack(
    slacks: list[float], name: str, profile: LatencyProfile, limit: int
) -> None:
    """Slack does not change here, which is worse than any viewer: only waiting can advance a session."""
    queue = Queue(slacks, GATHER_POLICIES.make(name), profile, limit)
    while queue.now < 300:
        queue.turn()
    assert min(queue.made) > 0
    # The aging of `step` advances a session past any other within (difference of credit) / aging seconds.
    spread = (max(slacks) - min(slacks)) / 0.25
    assert max(queue.longest) <= spread + 2 * len(slacks) * STEPS * profile(1) + 1


def test_tiers_run_one_session_by_tier_then_by_credit() -> None:
    # T is 5 × 0.02 s, so that credits below 0.2 s are urgent and those above 0.4 s relaxed.
    ready = [
        candidate("relaxed", credit_s=0.41),
        candidate("normal", credit_s=0.3),
        # With two more forwards T is 0.14 s, so that a greater credit is still urgent.
        candidate("long", credit_s=0.27, steps_left=STEPS + 2),
        candidate("urgent", credit_s=0.19),
    ]
    tiers = GATHER_POLICIES.make("tiers")
    order = []
    while ready:
        [first] = tiers.gather(ready, FLAT, 8)
        order.append(first.session)
        ready.remove(first)
    assert order == ["urgent", "long", "normal", "relaxed"]


def test_tiers_give_up_a_begun_chunk_for_a_poorer_session() -> None:
    ready = [candidate("begun", step=3, steps_left=2, credit_s=0.1), candidate("poorer", credit_s=0.05)]
    assert [c.session for c in GATHER_POLICIES.make("tiers").gather(ready, FLAT, 8)] == ["poorer"]


def test_fcfs_finishes_a_chunk_before_it_starts_another() -> None:
    ready = [candidate("old", waiting_s=9), candidate("running", step=2, steps_left=3, waiting_s=1)]
    assert [c.session for c in GATHER_POLICIES.make("fcfs").gather(ready, FLAT, 8)] == ["running"]
    assert [c.session for c in GATHER_POLICIES.make("fcfs").gather(ready[:1], FLAT, 8)] == ["old"]


def test_chunk_starts_all_together_and_lets_no_session_join() -> None:
    fresh = [candidate("a", waiting_s=1), candidate("b", waiting_s=2), candidate("c", waiting_s=3)]
    assert [c.session for c in GATHER_POLICIES.make("chunk").gather(fresh, LINEAR, 2)] == ["c", "b"]
    running = [candidate("a"), candidate("b", step=3), candidate("c", step=3)]
    assert {c.session for c in GATHER_POLICIES.make("chunk").gather(running, LINEAR, 8)} == {"b", "c"}


def test_step_joins_sessions_at_different_steps_least_credit_first() -> None:
    ready = [candidate("a", credit_s=3), candidate("b", step=4, credit_s=1), candidate("c", credit_s=2)]
    assert [c.session for c in GATHER_POLICIES.make("step").gather(ready, FLAT, 8)] == ["b", "c", "a"]
    assert [c.session for c in GATHER_POLICIES.make("step").gather(ready, LINEAR, 8)] == ["b"]


def test_step_batches_no_further_than_the_tightest_slack_allows() -> None:
    tight = candidate("tight", slack_s=STEPS * 0.0205, credit_s=0)
    ready = [tight, *(candidate(f"s{i}") for i in range(8))]
    batch = LeastCreditFirst().gather(ready, FLAT, 16)
    assert [c.session for c in batch] == ["tight"]
    # A session that is late already gains nothing from smaller batches.
    late = candidate("late", slack_s=0.01, credit_s=-1)
    assert len(LeastCreditFirst().gather([late, *ready[1:]], FLAT, 16)) == 9


def test_profiles_interpolate_and_learn() -> None:
    profile = LatencyProfile({1: 0.1, 4: 0.4})
    assert [profile(b) for b in (1, 2, 4, 6)] == pytest.approx([0.1, 0.2, 0.4, 0.6])
    assert LatencyProfile()(3) == 0.0
    for _ in range(2):
        profile.observe(1, 0.2)
    assert profile(1) == 0.1  # warm-up
    profile.observe(1, 9.0)
    assert profile(1) == 0.1  # outlier
    profile.observe(1, 0.2)
    assert profile(1) == pytest.approx(0.11)  # a tenth of the way
    for _ in range(5):
        profile.observe(1, 1.0)
    assert profile(1) == 1.0  # so many outliers are no outliers
    for _ in range(100):
        profile.observe(1, 0.2)
    assert profile(1) == pytest.approx(0.2, rel=1e-3)
    for _ in range(3):
        profile.observe(2, 0.25)
    assert profile.to_mapping().keys() == {1, 2, 4}


def test_the_best_batch_stops_where_a_larger_one_no_longer_pays() -> None:
    assert LINEAR.best_batch(16) == 1
    assert FLAT.best_batch(16) == 16
    assert FLAT.best_batch(5) == 5
    assert LatencyProfile({1: 0.1, 4: 0.12, 8: 0.3, 16: 0.6}).best_batch(16) == 4
    # A size that does not pay gives no information on the next.
    dipped = LatencyProfile({1: 0.1, 2: 0.1, 4: 0.21, 8: 0.25, 16: 0.6})
    assert [dipped.best_batch(limit) for limit in (1, 2, 4, 8, 16)] == [1, 2, 2, 8, 8]


def test_a_batch_that_gains_little_waits_for_many() -> None:
    little = LatencyProfile({1: 0.1, 2: 0.185, 16: 1.35})
    two, many = ([candidate(str(number), slack_s=1e3) for number in range(count)] for count in (2, 16))
    assert len(GATHER_POLICIES.make("step").gather(two, little, 16)) == 1
    assert len(GATHER_POLICIES.make("step").gather(many, little, 16)) > 4


def test_a_size_that_seemed_bad_is_tried_again() -> None:
    profile = LatencyProfile({1: 0.1, 2: 0.5})
    for _ in range(200):
        assert profile.best_batch(8) == 1
        profile.observe(1, 0.1)
    profile.observe(1, 0.1)
    # Once, whether or not it takes place.
    assert [profile.best_batch(8) for _ in range(2)] == [2, 1]
    for _ in range(60):
        profile.observe(2, 0.18)
    assert profile.best_batch(2) == 2
    assert profile(2) < 0.2


def test_a_size_that_is_tried_again_and_still_bad_changes_nothing_else() -> None:
    """Incident: it made the next size look good, which was then chosen and never measured."""
    seconds = {1: 0.1, 2: 0.25, 3: 0.33, 4: 0.44}
    profile, taken = LatencyProfile(seconds), Counter[int]()
    for _ in range(2_000):
        size = profile.best_batch(4, 0.2)
        taken[size] += 1
        profile.observe(size, seconds[size])
    assert taken[1] > 1_900
    # Each of the others from time to time, so that no old measurement stays.
    assert all(0 < taken[size] < 20 for size in (2, 3, 4))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 10**12),
    st.integers(0, 10**11),
    st.integers(0, 10**10),
    st.integers(1, 10**10),
    st.integers(0, 10**10),
)
def test_budgets_never_promise_more_than_there_is(
    total: int, model: int, workspace: int, slab: int, decode: int
) -> None:
    budget = MemoryBudget(total, model, workspace, slab, decode)
    if model + workspace + slab + decode > total:
        with pytest.raises(BudgetTooSmallError):
            budget.sessions()
        return
    count = budget.sessions()
    used = model + workspace + count * (slab + decode)
    assert count >= 1
    assert used <= total < used + slab + decode


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 40_000), st.lists(st.booleans(), max_size=40))
def test_a_pool_hands_out_what_fits_and_no_more(capacity: int, takes: list[bool]) -> None:
    layout = SlabLayout(2, 3, 4, 2, 6, 5, 1, torch.float32)
    if capacity < layout.total_bytes:
        with pytest.raises(BudgetTooSmallError):
            SlabPool(layout, capacity, torch.device("cpu"))
        return
    pool = SlabPool(layout, capacity, torch.device("cpu"))
    assert pool.allocated_bytes <= capacity
    held: list[Slab] = []
    for take in takes:
        if take and len(held) < pool.slabs:
            held.append(pool.acquire())
        elif take:
            with pytest.raises(SlabsExhaustedError):
                pool.acquire()
        elif held:
            pool.release(held.pop())
        assert pool.free == pool.slabs - len(held)
        assert len({slab.index for slab in held}) == len(held)
    for slab in held:
        pool.release(slab)
    assert pool.free == pool.slabs


def test_the_video_that_must_be_whole_first_runs_first() -> None:
    policy = GATHER_POLICIES.make("stream-deadline")
    long, short = candidate("long", slack_s=1.0, left_s=15.0), candidate("short", slack_s=5.0, left_s=5.0)
    endless = candidate("endless", slack_s=0.0)
    assert policy.gather([long, endless, short], LINEAR, 3) == [short]
    # A chunk that has begun is finished first.
    begun = candidate("begun", step=2, steps_left=3, slack_s=9.0, left_s=20.0)
    assert policy.gather([long, begun, short], LINEAR, 3) == [begun]


@pytest.mark.parametrize(("alpha", "first"), [(1.0, "long"), (2.0, "short")])
def test_tiers_are_as_wide_as_the_worker_says(alpha: float, first: str) -> None:
    tiers = GATHER_POLICIES.make("tiers")
    # T is 0.1 s and 0.2 s. With α = 1 only the longer chunk is urgent, with α = 2 both are.
    short = candidate("short", credit_s=0.11, alpha=alpha)
    long = candidate("long", steps_left=2 * STEPS, credit_s=0.19, alpha=alpha)
    assert [one.session for one in tiers.gather([short, long], LINEAR, 2)] == [first]


def test_answers_of_a_profile_follow_its_samples() -> None:
    chance = random.Random(5)
    profile = LatencyProfile({1: 0.05, 2: 0.08, 8: 0.2})
    for _ in range(120):
        fresh = LatencyProfile(profile.to_mapping())
        for limit in (1, 3, 6, 12):
            assert profile(limit) == fresh(limit)
            assert profile.paying_batch(limit, 0.05) == fresh.paying_batch(limit, 0.05)
            assert profile.paying_batch(limit, 0.4) == fresh.paying_batch(limit, 0.4)
        size = chance.choice((1, 2, 3, 6, 8))
        profile.observe(size, 0.03 * size * chance.uniform(0.5, 4.0))
