"""Objects by name: the built-in ones of a service, and those that other distributions install.

A distribution offers an object by an entry point. Its group and the prefix of its name identify its kind.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class NotInstalledError(ValueError):
    """No installed distribution offers an object of this kind and name.

    A retry fails again unless such a distribution is installed.
    """

    def __init__(self, kind: str, name: str, installed: tuple[str, ...]) -> None:
        super().__init__(f"no {kind} {name!r} is installed; installed: {', '.join(installed)}")
        self.kind = kind
        self.name = name
        self.installed = installed


class PluginLoadError(ImportError):
    """A distribution offers the object, but it cannot be imported.

    A retry fails again unless the distribution is repaired.
    """

    def __init__(self, kind: str, point: EntryPoint, error: Exception) -> None:
        self.distribution = "unknown" if point.dist is None else point.dist.name
        self.entry_point = f"{point.name} = {point.value}"
        super().__init__(
            f"distribution {self.distribution}: cannot load the {kind} {self.entry_point!r}: {error!r}"
        )


class Plugins(Generic[T]):
    """The objects of one kind."""

    def __init__(self, kind: str, group: str, built_in: Mapping[str, T], *, prefix: str = "") -> None:
        """`built_in` has the service's own objects. An installed object never replaces one of them.

        `prefix`: how names of entry points of this kind begin. It is no part of an object's name.
        """
        self.kind = kind
        self._group, self._prefix = group, prefix
        self._built_in = dict(built_in)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all objects: the built-in ones first, then the installed ones, sorted."""
        return (*self._built_in, *sorted(self._installed().keys() - self._built_in.keys()))

    def check(self, name: str) -> str:
        """Return `name`, without importing its object. Raises `NotInstalledError`."""
        self._find(name)
        return name

    def load(self, name: str) -> T:
        """Return the object. Raises `NotInstalledError` or `PluginLoadError`."""
        found = self._find(name)
        if not isinstance(found, EntryPoint):
            return found
        try:
            loaded: T = found.load()
        except Exception as error:  # An import runs any code.
            raise PluginLoadError(self.kind, found, error) from error
        return loaded

    def _find(self, name: str) -> T | EntryPoint:
        # Listing what is installed reads the metadata of every distribution.
        found = self._built_in.get(name) or self._installed().get(name)
        if found is None:
            raise NotInstalledError(self.kind, name, self.names)
        return found

    def _installed(self) -> dict[str, EntryPoint]:
        return {
            point.name.removeprefix(self._prefix): point
            for point in _points(self._group, tuple(sys.path))
            if point.name.startswith(self._prefix)
        }


@functools.lru_cache(maxsize=64)
def _points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of all distributions on `path`, which is `sys.path`.

    A process keeps them: reading the metadata takes milliseconds.
    """
    return tuple(entry_points(group=group))
