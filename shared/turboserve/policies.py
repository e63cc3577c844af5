"""Policies by name: the built-in ones of a service, and those that other distributions install.

A distribution offers a policy under the entry-point group `turboserve.policies`, as `KIND.NAME`:

    [project.entry-points."turboserve.policies"]
    "placement.round-robin" = "turboserve.baselines.greedy:RoundRobin"

The kinds are `placement` and `rebalancer` (scheduler), and `gather` and `fidelity` (worker). The object is
called without arguments, and each call returns a new policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

GROUP = "turboserve.policies"

P = TypeVar("P")


class UnknownPolicyError(ValueError):
    """No installed distribution offers a policy of this kind and name.

    A retry fails again unless such a distribution is installed.
    """

    def __init__(self, kind: str, name: str, installed: tuple[str, ...]) -> None:
        super().__init__(f"no {kind} policy {name!r} is installed; installed: {', '.join(installed)}")
        self.kind = kind
        self.name = name
        self.installed = installed


class PolicyLoadError(ImportError):
    """A distribution offers the policy, but its object cannot be imported.

    A retry fails again unless the distribution is repaired.
    """

    def __init__(self, point: EntryPoint, error: Exception) -> None:
        self.distribution = "unknown" if point.dist is None else point.dist.name
        self.entry_point = f"{point.name} = {point.value}"
        super().__init__(
            f"distribution {self.distribution}: cannot load the policy {self.entry_point!r}: {error!r}"
        )


class Policies(Generic[P]):
    """The policies of one kind."""

    def __init__(self, kind: str, built_in: Mapping[str, Callable[[], P]]) -> None:
        """`built_in` has the service's own policies. An installed policy never replaces one of them."""
        self.kind = kind
        self._built_in = dict(built_in)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all policies: the built-in ones first, then the installed ones, sorted."""
        return (*self._built_in, *sorted(self._installed().keys() - self._built_in.keys()))

    def check(self, name: str) -> str:
        """Return `name`, without importing its policy. Raises `UnknownPolicyError`."""
        self._find(name)
        return name

    def make(self, name: str) -> P:
        """Return a new policy. Raises `UnknownPolicyError` or `PolicyLoadError`."""
        found = self._find(name)
        if not isinstance(found, EntryPoint):
            return found()
        try:
            create: Callable[[], P] = found.load()
        except Exception as error:  # An import runs any code.
            raise PolicyLoadError(found, error) from error
        return create()

    def _find(self, name: str) -> Callable[[], P] | EntryPoint:
        # Listing what is installed reads the metadata of every distribution.
        found = self._built_in.get(name) or self._installed().get(name)
        if found is None:
            raise UnknownPolicyError(self.kind, name, self.names)
        return found

    def _installed(self) -> dict[str, EntryPoint]:
        prefix = f"{self.kind}."
        return {
            point.name.removeprefix(prefix): point
            for point in entry_points(group=GROUP)
            if point.name.startswith(prefix)
        }
