"""When shares are solved again, and when quotas are too old. No clock, and no solver.

Changes, outcomes and the time come in, and the problems to solve come out. `ShareKeeper` solves them at once,
the running scheduler (`live_shares`) by a command.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from turboserve.scheduler.placement.quotas import ShareProblem

LEAST_INTERVAL_S = 1.0
"""Least time between two solutions."""
OLD_S = 5.0
"""Quotas that lack a change for longer than this are not used: placement is then min-max alone."""

Problems = tuple[ShareProblem, ...]


class ShareRefresh:
    """Whether the quotas of some workers are of the present, and what is solved next. Times are monotonic."""

    def __init__(self) -> None:
        self.failed: str | None = None
        """Why the last problems were not solved. None: they were."""
        self._asked: Problems = ()
        """The newest problems that are solved, or are being solved."""
        self._asked_at = -inf
        self._under_way = False
        self._wanted = False
        """Whether something may have changed since `_asked`."""
        self._since: float | None = None
        """Time of the first change that the quotas may lack. None: they lack none."""
        self._later: float | None = None
        """Time of the first change since `_asked`."""

    def changed(self, now: float) -> None:
        """Note that workers or sessions may have changed."""
        self._wanted = True
        self._since = now if self._since is None else self._since
        self._later = now if self._later is None else self._later

    def next(self, present: Callable[[], Problems], now: float) -> Problems | None:
        """Return the problems to solve now: `solved` or `not_solved` has to follow.

        None: there is nothing to do. Empty: nothing has to be solved, and there are no quotas from now on.
        `present` makes the problems of the present, and is called only if they may be due.
        """
        if not self._wanted or self._under_way or now < self._asked_at + LEAST_INTERVAL_S:
            return None
        problems = present()
        self._wanted, self._later, self._asked_at = False, None, now
        if problems and problems == self._asked:
            self._since = None
            return None
        self._asked = problems
        if problems:
            self._under_way = True
        else:
            self._since = self.failed = None
        return problems

    def solved(self) -> None:
        """Note that there are quotas for the problems under way."""
        self._under_way, self.failed, self._since = False, None, self._later

    def not_solved(self, reason: str | None) -> None:
        """Note that there are none. The former quotas hold until they are old. The problems come again."""
        self._under_way, self.failed, self._wanted, self._asked = False, reason, True, ()

    def are_old(self, now: float) -> bool:
        """Whether the quotas are too old to be used."""
        return self._since is not None and now - self._since > OLD_S

    def check_answer(self, now: float) -> None:
        """Count a solver that is silent for `OLD_S` as failed, until it answers."""
        if self._under_way and now - self._asked_at > OLD_S:
            self.failed = f"the solver has not answered for {OLD_S:g} s"
