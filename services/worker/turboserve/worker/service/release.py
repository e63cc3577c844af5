"""The release of this worker's software."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _release() -> str | None:
    try:
        return version("turboserve-worker")
    except PackageNotFoundError:
        return None


RELEASE = _release()
"""Version of the installed distribution. None: the worker runs from files that are not installed."""
