"""Linear programs, solved by HiGHS. They may have integral columns.

HiGHS (`highspy`) is imported when the first program is solved: a service that solves none does not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any


class SolverError(Exception):
    """A program has no optimum that was found. The message has the solver's status. A retry fails again."""


@dataclass(frozen=True)
class Solution:
    """The optimum of a program."""

    values: Sequence[float]
    """Value of each column."""
    duals: Sequence[float]
    """Dual price of each row; empty for a program with integral columns."""
    objective: float


class LinearProgram:
    """Minimize c · x within bounds of columns and rows.

    Columns and rows are added first. Then any number of objectives are minimized one after the other, with
    bounds changed in between. Each solution starts from the last one's basis.
    """

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._integral: list[int] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._starts: list[int] = []
        self._index: list[int] = []
        self._values: list[float] = []
        self._highs: Any = None

    @property
    def columns(self) -> int:
        return len(self._lower)

    def column(self, lower: float = 0.0, upper: float = inf, integral: bool = False) -> int:
        """Add a column; returns its index."""
        self._lower.append(lower)
        self._upper.append(upper)
        self._integral.append(int(integral))
        return len(self._lower) - 1

    def row(self, terms: Sequence[tuple[int, float]], lower: float = -inf, upper: float = inf) -> int:
        """Add lower ≤ Σ value · column ≤ upper; returns the row's index."""
        self._starts.append(len(self._index))
        self._index.extend(column for column, _ in terms)
        self._values.extend(value for _, value in terms)
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        return len(self._row_lower) - 1

    def bound_column(self, column: int, lower: float, upper: float) -> None:
        self._lower[column], self._upper[column] = lower, upper
        if self._highs is not None:
            self._highs.changeColBounds(column, lower, upper)

    def bound_columns(self, columns: Sequence[int], lower: Sequence[float], upper: Sequence[float]) -> None:
        for column, least, most in zip(columns, lower, upper, strict=True):
            self._lower[column], self._upper[column] = least, most
        if self._highs is not None:
            self._highs.changeColsBounds(len(columns), columns, lower, upper)

    def bound_row(self, row: int, lower: float, upper: float) -> None:
        self._row_lower[row], self._row_upper[row] = lower, upper
        if self._highs is not None:
            self._highs.changeRowBounds(row, lower, upper)

    def minimize(self, cost: Sequence[tuple[int, float]], gap: float = 0.0) -> Solution:
        """Return the optimum. `cost` has the columns with a price.

        `gap`: relative distance from the optimum at which a search over integral columns ends.

        Raises SolverError if the program has no solution or no finite optimum, or if HiGHS is not installed.
        """
        try:
            import highspy
            import numpy as np
        except ImportError as error:
            raise SolverError(
                "highspy is not installed: install turboserve-scheduler[shares] or "
                "turboserve-autoscaler[composition]"
            ) from error
        prices = np.zeros(self.columns)
        for column, price in cost:
            prices[column] += price
        if self._highs is None:
            self._highs = self._passed(highspy, np)
        highs = self._highs
        highs.changeColsCost(self.columns, np.arange(self.columns, dtype=np.int32), prices)
        if any(self._integral):
            highs.setOptionValue("mip_rel_gap", gap)
        return self.again()

    def again(self) -> Solution:
        """Return the optimum of the last objective, with other bounds. Raises as `minimize`."""
        import highspy

        highs, statuses = self._highs, highspy.HighsModelStatus
        highs.run()
        status = highs.getModelStatus()
        if status not in (statuses.kOptimal, statuses.kInfeasible, statuses.kUnbounded):
            # Numbers of very unlike size need presolve, and another basis than the last one.
            highs.clearSolver()
            highs.setOptionValue("presolve", "on")
            highs.run()
            highs.setOptionValue("presolve", "choose" if any(self._integral) else "off")
            status = highs.getModelStatus()
        if status != statuses.kOptimal:
            raise SolverError(f"no optimum: {highs.modelStatusToString(status)}")
        solution = highs.getSolution()
        duals = () if any(self._integral) else list(solution.row_dual)
        return Solution(list(solution.col_value), duals, float(highs.getObjectiveValue()))

    def _passed(self, highspy: Any, np: Any) -> Any:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.columns, len(self._row_lower)
        model.col_cost_ = np.zeros(self.columns)
        model.col_lower_, model.col_upper_ = np.array(self._lower), np.array(self._upper)
        model.row_lower_, model.row_upper_ = np.array(self._row_lower), np.array(self._row_upper)
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.array([*self._starts, len(self._index)], dtype=np.int32)
        matrix.index_ = np.array(self._index, dtype=np.int32)
        matrix.value_ = np.array(self._values)
        if any(self._integral):
            kinds = highspy.HighsVarType
            model.integrality_ = [kinds.kInteger if one else kinds.kContinuous for one in self._integral]
        highs = _quiet(highspy)()
        highs.setOptionValue("threads", 1)
        if any(self._integral):
            # The programs are small: a second presolve takes longer than it spares.
            highs.setOptionValue("mip_allow_restart", False)
        else:
            # The programs are small: simplex from the last basis takes less time than presolve.
            highs.setOptionValue("presolve", "off")
            highs.setOptionValue("solver", "simplex")
        highs.passModel(model)
        return highs


def _quiet(highspy: Any) -> Any:
    """Return the solver's class without the banner that its constructor prints to the standard output."""

    class Quiet(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return Quiet
