"""Shares by linear programs: optima, rounding, quotas, and OServe's flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.drawn_mixes import CLASSES, GB, demands, pools
from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import LinearProgram, SolverError
from turboserve.baselines.oserve import FlowShares, MostSessions
from turboserve.scheduler.placement import Kind, Shares, solve_shares
from turboserve.scheduler.placement.quotas import Worker, quotas_of, round_shares

A, B, C = CLASSES[:3]
ERROR = 1e-5
few = settings(max_examples=40 if settings().derandomize else 150)
"""Each example solves several programs."""


def check_feasible(kinds: Sequence[Kind], demand: Mapping[SessionClass, float], shares: Shares) -> None:
    for kind in kinds:
        of_kind = {one: n for (name, one), n in shares.sessions.items() if name == kind.name}
        capability = kind.capability
        assert all(capability.serves(one) for one in of_kind)
        assert sum(n / capability.sessions[one] for one, n in of_kind.items()) <= kind.workers * (1 + ERROR)
        if capability.memory_bytes:
            used = sum(n * capability.state_bytes.get(one, 0) for one, n in of_kind.items())
            assert used <= kind.workers * capability.memory_bytes * (1 + ERROR)
    for one, wanted in demand.items():
        got = sum(n for (_, other), n in shares.sessions.items() if other == one)
        assert got <= wanted * (1 + ERROR)
        assert got / wanted == pytest.approx(shares.served[one], abs=1e-4)


def can_serve(kinds: Sequence[Kind], least: Mapping[SessionClass, float]) -> bool:
    """Whether some shares serve these numbers of sessions: another program than the one under test."""
    linear = LinearProgram()
    columns = {(k, one): linear.column() for k in range(len(kinds)) for one in least}
    for (k, one), column in columns.items():
        if not kinds[k].capability.serves(one):
            linear.bound_column(column, 0.0, 0.0)
    for k, kind in enumerate(kinds):
        rates, sizes = kind.capability.sessions, kind.capability.state_bytes
        terms = [(columns[k, one], 1 / rates[one]) for one in least if rates.get(one)]
        linear.row(terms, upper=kind.workers)
        if kind.capability.memory_bytes:
            memory = kind.workers * kind.capability.memory_bytes / GB
            linear.row([(columns[k, one], sizes.get(one, 0) / GB) for one in least], upper=memory)
    for one, wanted in least.items():
        linear.row([(columns[k, one], 1.0) for k in range(len(kinds))], lower=wanted)
    try:
        linear.minimize([])
    except SolverError:
        return False
    return True


@few
@given(pools(), demands)
def test_the_served_fractions_are_max_min(kinds: list[Kind], demand: dict[SessionClass, int]) -> None:
    shares = solve_shares(kinds, demand)
    check_feasible(kinds, demand, shares)
    for one, fraction in shares.served.items():
        if not any(kind.capability.serves(one) for kind in kinds):
            assert fraction == 0
            continue
        if fraction < 1 - 1e-4:
            # More of this class is possible only with less of a class that has no more than it.
            higher = min(1.0, fraction + 0.01)
            wanted = {
                other: demand[other] * (higher if other == one else shares.served[other] * (1 - 1e-6))
                for other in demand
                if shares.served[other] <= fraction + 1e-6 or other == one
            }
            assert not can_serve(kinds, wanted)


@few
@given(pools(), demands)
def test_the_present_placement_costs_nothing_if_it_is_optimal(
    kinds: list[Kind], demand: dict[SessionClass, int]
) -> None:
    first = solve_shares(kinds, demand)
    again = solve_shares(kinds, demand, first.sessions)
    assert again.cost_s == pytest.approx(0.0, abs=1e-3)
    assert again.utilization <= first.utilization * 1.01 + ERROR


def test_of_equal_shares_those_that_migrate_less_are_chosen() -> None:
    kinds = [Kind("a", 1, Capability({A: 10, B: 10})), Kind("b", 1, Capability({A: 10, B: 10}))]
    placed = {("a", A): 4.0, ("b", B): 4.0}
    shares = solve_shares(kinds, {A: 4, B: 4}, placed)
    assert shares.cost_s == pytest.approx(0.0, abs=1e-6)
    assert shares.of("a", A) == pytest.approx(4.0, abs=1e-4)
    # And the sessions whose migration costs less migrate.
    placed = {("a", A): 4.0, ("a", B): 4.0}
    shares = solve_shares(kinds, {A: 4, B: 4}, placed, {A: 1.0, B: 3.0})
    assert shares.of("a", B) == pytest.approx(4.0, abs=0.1)
    assert shares.cost_s == pytest.approx(4.0, abs=0.2)


def test_one_class_uses_all_kinds_equally() -> None:
    kinds = [Kind("slow", 2, Capability({A: 3})), Kind("fast", 1, Capability({A: 12}))]
    shares = solve_shares(kinds, {A: 9})
    assert shares.utilization == pytest.approx(0.5)
    assert shares.of("slow", A) == pytest.approx(3.0)
    assert shares.of("fast", A) == pytest.approx(6.0)


def test_a_class_that_costs_more_is_not_starved() -> None:
    """OServe's objective counts sessions, so it gives the pool to the class whose sessions cost less."""
    kinds = [Kind("k", 1, Capability({A: 2, B: 10}))]
    demand = {A: 2, B: 10}
    ours, most = solve_shares(kinds, demand), MostSessions()(kinds, demand, {})
    assert most.served == pytest.approx({A: 0.0, B: 1.0})
    assert ours.served == pytest.approx({A: 0.5, B: 0.5})


def test_each_kind_gets_what_it_does_best_where_the_flow_does_not() -> None:
    """The gap of the plain flow: a cycle that serves the same sessions with fewer units remains."""
    kinds = [Kind("x", 1, Capability({A: 5, B: 5})), Kind("y", 1, Capability({A: 1, B: 5}))]
    demand = {A: 5, B: 5}
    assert min(solve_shares(kinds, demand).served.values()) == pytest.approx(1.0)
    flow = FlowShares()(kinds, demand, {})
    check_feasible(kinds, demand, flow)
    assert sum(flow.sessions.values()) == pytest.approx(6.0)


@few
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=4),
    st.lists(st.integers(1, 60), min_size=4, max_size=4),
)
def test_the_flow_is_exact_if_all_kinds_differ_only_in_speed(
    speeds: list[int], parts: list[int], wanted: list[int]
) -> None:
    """With n_kj = s_k / w_j the network is a plain one, and preflow-push finds its maximum."""
    classes = CLASSES[: len(parts)]
    kinds = [
        Kind(
            f"k{k}",
            2,
            Capability({one: 12 * speed // part for one, part in zip(classes, parts, strict=True)}),
        )
        for k, speed in enumerate(speeds)
    ]
    demand = dict(zip(classes, wanted, strict=False))
    flow = FlowShares()(kinds, demand, {})
    check_feasible(kinds, demand, flow)
    work = {one: part / 12 for one, part in zip(classes, parts, strict=True)}
    used = sum(n * work[one] for (_, one), n in flow.sessions.items())
    most = min(2.0 * sum(speeds), sum(demand[one] * work[one] for one in demand))
    assert used == pytest.approx(most, rel=1e-3)


@few
@given(pools(), demands)
def test_baselines_keep_to_the_capacity(kinds: list[Kind], demand: dict[SessionClass, int]) -> None:
    # OServe's network knows no memory.
    kinds = [Kind(k.name, k.workers, Capability(k.capability.sessions)) for k in kinds]
    flow, most = FlowShares()(kinds, demand, {}), MostSessions()(kinds, demand, {})
    check_feasible(kinds, demand, flow)
    check_feasible(kinds, demand, most)
    assert sum(flow.sessions.values()) <= sum(most.sessions.values()) + 1e-3


@few
@given(pools(), demands)
def test_rounding_keeps_the_stated_bound(kinds: list[Kind], demand: dict[SessionClass, int]) -> None:
    shares = solve_shares(kinds, demand)
    whole = round_shares(kinds, shares, demand)
    as_shares = Shares({cell: float(n) for cell, n in whole.items()}, {}, 0.0)
    check_feasible(kinds, {}, as_shares)
    for one in demand:
        exact = {cell: n for cell, n in shares.sessions.items() if cell[1] == one}
        fractions = sum(abs(n - round(n)) > 1e-6 for n in exact.values())
        got = sum(n for cell, n in whole.items() if cell[1] == one)
        assert got <= demand[one]
        assert got > sum(exact.values()) - max(fractions, ERROR) - ERROR
        assert all(abs(whole.get(cell, 0) - n) < 1 + ERROR for cell, n in exact.items())


@few
@given(pools(), demands, st.randoms(use_true_random=False))
def test_quotas_fit_into_every_worker(
    kinds: list[Kind], demand: dict[SessionClass, int], chance: Random
) -> None:
    workers: dict[str, list[Worker]] = {}
    wanted: Counter[SessionClass] = Counter(demand)
    for kind in kinds:
        workers[kind.name] = []
        for index in range(kind.workers):
            counts: Counter[SessionClass] = Counter()
            for one in chance.sample(CLASSES, 2):
                counts[one] += min(1, kind.capability.most(one, counts))
            wanted.update(counts)
            workers[kind.name].append(Worker(f"{kind.name}-{index}", kind.capability, +counts))
    demand = dict(+wanted)
    shares = solve_shares(kinds, demand)
    quotas = quotas_of(workers, kinds, shares, demand)
    total: Counter[SessionClass] = Counter()
    for of_kind in workers.values():
        for worker in of_kind:
            assert worker.capability.fits(quotas[worker.name])
            total.update(quotas[worker.name])
    assert all(total[one] <= demand[one] for one in total)


def test_a_solver_without_a_solution_says_so() -> None:
    linear = LinearProgram()
    column = linear.column()
    linear.row([(column, 1.0)], upper=-1.0)
    with pytest.raises(SolverError, match="Infeasible"):
        linear.minimize([(column, 1.0)])


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solve_shares([Kind("k", 1, Capability({A: 2}))], {A: 1})
    assert capfd.readouterr() == ("", "")
