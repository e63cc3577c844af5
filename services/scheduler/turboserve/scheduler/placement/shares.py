"""Shares: how many sessions of each class the workers of each kind should have, by an exact linear program.

x_kj sessions of class j go to kind k, which has m_k workers. Three objectives are lexicographic:

1. the served fractions Σ_k x_kj / d_j are max-min: the least one is as large as possible, then the next.
2. the worst predicted slack is largest: the least time that a chunk is ready before it is needed. Workers of
   kind k whose sessions use the part u_k of them have it (1 - u_k) of a chunk's playing time, so the largest
   u_k is smallest.
3. the migrations cost least: η Σ κ over the sessions that leave the kind on which they are. The present
   placement costs nothing.

within Σ_j x_kj / n_kj ≤ u_k m_k, Σ_j b_j x_kj ≤ m_k B_k and Σ_k x_kj ≤ d_j.

OServe (4.2) maximizes Σ x instead. In an overloaded pool that serves the classes whose sessions cost least,
and no session of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import LinearProgram, Solution

Demand = Mapping[SessionClass, float]
Cells = Mapping[tuple[str, SessionClass], float]
"""Sessions by kind and class."""
EXACT = 1e-7
"""Tolerance between two objectives: the later ones give up no more than this part of the earlier ones."""
LEAST_GAIN = 0.01
"""Part of u that the third objective may give up. A smaller gain is noise of the profiles, and costs
migrations."""


@dataclass(frozen=True)
class Kind:
    """Workers of equal capability."""

    name: str
    workers: int
    capability: Capability

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers: kind {self.name} has {self.workers} workers, not 1 or more")


@dataclass(frozen=True)
class Shares:
    """The optimum of one program."""

    sessions: Cells
    """x_kj, larger than 0. Fractions of sessions are possible."""
    served: Mapping[SessionClass, float]
    """Served fraction of each class in demand, 0 to 1."""
    utilization: float
    """Largest u_k, 0 to 1."""
    cost_s: float = 0.0
    """Σ κ: seconds of transfer of the migrations from the present placement."""

    def of(self, kind: str, session_class: SessionClass) -> float:
        return self.sessions.get((kind, session_class), 0.0)


@dataclass
class _Program:
    """The columns and rows of one program."""

    linear: LinearProgram = field(default_factory=LinearProgram)
    staying: dict[tuple[str, SessionClass], int] = field(default_factory=dict)
    """Columns of the sessions that stay on the kind on which they are."""
    coming: dict[tuple[str, SessionClass], int] = field(default_factory=dict)
    """Columns of the other sessions. x_kj is the sum of both. No row says so, which spares time."""
    least: int = 0
    """Column of the least served fraction."""
    used: int = 0
    """Column of the largest u_k."""
    total: dict[SessionClass, int] = field(default_factory=dict)
    """Rows Σ_k x_kj ≤ d_j."""
    raised: dict[SessionClass, int] = field(default_factory=dict)
    """Rows Σ_k x_kj ≥ d_j · least."""


def solve_shares(
    kinds: Sequence[Kind],
    demand: Demand,
    placed: Cells | None = None,
    cost_s: Mapping[SessionClass, float] | None = None,
) -> Shares:
    """Return the optimal shares.

    Args: `demand` has the sessions d_j that have or want a slot, by class. `placed` has those that are on a
    worker, by kind and class. `cost_s` has κ of one migration, by class; 1 s if it is missing.

    A class that no kind can serve is served 0 and does not count in the max-min. Raises SolverError.
    """
    wanted = {one: float(count) for one, count in demand.items() if count > 0}
    possible = {one for one in wanted if any(kind.capability.serves(one) for kind in kinds)}
    served = dict.fromkeys(wanted, 0.0)
    if not possible:
        return Shares({}, served, 0.0)
    program = _program(kinds, {one: wanted[one] for one in possible}, placed or {})
    solution = _max_min(program, wanted, served, possible)
    solution = _least_used(program)
    utilization = solution.values[program.used]
    cost = 0.0
    if program.staying:
        limit = min(1.0, utilization * (1 + LEAST_GAIN) + EXACT)
        program.linear.bound_column(program.used, 0.0, limit)
        costs = cost_s or {}
        gains = [(column, -costs.get(one, 1.0)) for (_, one), column in program.staying.items()]
        solution = program.linear.minimize(gains)
        all_leave = sum(costs.get(cell[1], 1.0) * (placed or {})[cell] for cell in program.staying)
        cost = max(0.0, all_leave + solution.objective)
    sessions = {}
    for cell, column in program.coming.items():
        count = solution.values[column]
        if (stays := program.staying.get(cell)) is not None:
            count += solution.values[stays]
        if count > EXACT:
            sessions[cell] = count
    return Shares(sessions, served, min(1.0, _utilization(kinds, sessions)), cost)


def _program(kinds: Sequence[Kind], wanted: Demand, placed: Cells) -> _Program:
    program = _Program()
    linear = program.linear
    program.least = linear.column(0.0, 1.0)
    program.used = linear.column(1.0, 1.0)
    by_class: dict[SessionClass, list[tuple[int, float]]] = {one: [] for one in sorted(wanted)}
    for kind in kinds:
        time_terms, byte_terms = [], []
        capability = kind.capability
        for one, terms in by_class.items():
            if (served := capability.sessions.get(one, 0)) <= 0:
                continue
            cell = kind.name, one
            columns = [linear.column(0.0, wanted[one])]
            program.coming[cell] = columns[0]
            if present := placed.get(cell, 0.0):
                columns.append(linear.column(0.0, present))
                program.staying[cell] = columns[1]
            size = capability.state_bytes.get(one, 0) if capability.memory_bytes else 0
            for column in columns:
                terms.append((column, 1.0))
                time_terms.append((column, 1.0 / served))
                if size:
                    byte_terms.append((column, size / capability.memory_bytes))
        if time_terms:
            linear.row([*time_terms, (program.used, -float(kind.workers))], upper=0.0)
        if byte_terms:
            linear.row(byte_terms, upper=float(kind.workers))
    for one, terms in by_class.items():
        program.total[one] = linear.row(terms, upper=wanted[one])
        program.raised[one] = linear.row([*terms, (program.least, -wanted[one])], lower=0.0)
    return program


def _max_min(
    program: _Program, wanted: Demand, served: dict[SessionClass, float], possible: set[SessionClass]
) -> Solution:
    """Fix the served fractions, the least one first. Fills `served`.

    A class whose row has a positive dual price is at the least fraction in every optimum, so its fraction is
    final. At least one has: the prices times the demands add up to 1 as long as the least fraction is below
    1. So there are at most as many programs as classes.
    """
    linear, open_ = program.linear, sorted(possible)
    while True:
        solution = linear.minimize([(program.least, -1.0)])
        least = min(1.0, max(0.0, solution.values[program.least]))
        bound = open_
        if least < 1 - EXACT:
            prices = {one: solution.duals[program.raised[one]] * wanted[one] for one in open_}
            bound = [one for one in open_ if prices[one] > EXACT] or open_
        for one in bound:
            served[one] = least
            # Rounding of the solver must not make the next program infeasible.
            linear.bound_row(program.raised[one], -1e30, 1e30)
            linear.bound_row(program.total[one], least * (1 - EXACT) * wanted[one], wanted[one])
        open_ = [one for one in open_ if one not in bound]
        if not open_:
            linear.bound_column(program.least, 0.0, 0.0)
            return solution


def _least_used(program: _Program) -> Solution:
    program.linear.bound_column(program.used, 0.0, 1.0)
    return program.linear.minimize([(program.used, 1.0)])


def _utilization(kinds: Sequence[Kind], sessions: Cells) -> float:
    """Return the largest u_k of some shares."""
    used = {kind.name: 0.0 for kind in kinds}
    rates = {kind.name: (kind.capability.sessions, kind.workers) for kind in kinds}
    for (name, one), count in sessions.items():
        served, workers = rates[name]
        used[name] += count / served[one] / workers
    return max(used.values(), default=0.0)
