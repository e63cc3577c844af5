"""Policies by name: the built-in ones of a service, and those that other distributions install.

A distribution offers a policy under the entry-point group `turboserve.policies`, as `KIND.NAME`:

    [project.entry-points."turboserve.policies"]
    "placement.round-robin" = "turboserve.baselines.greedy:RoundRobin"

The kinds are `placement`, `shares` and `rebalancer` (scheduler), and `gather` and `fidelity` (worker). The
object is called without arguments, and each call returns a new policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from turboserve.plugins import Plugins

GROUP = "turboserve.policies"

P = TypeVar("P")


class Policies(Plugins[Callable[[], P]]):
    """The policies of one kind."""

    def __init__(self, kind: str, built_in: Mapping[str, Callable[[], P]]) -> None:
        """`built_in` has the service's own policies. An installed policy never replaces one of them."""
        super().__init__(f"{kind} policy", GROUP, built_in, prefix=f"{kind}.")

    def make(self, name: str) -> P:
        """Return a new policy. Raises `NotInstalledError` or `PluginLoadError`."""
        return self.load(name)()
