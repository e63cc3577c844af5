"""The shipped table of parameters, made by `turboserve profile autoscaler` from the traces of Appendix A."""

from __future__ import annotations

from importlib import resources

from turboserve.contracts.autoscale import ProfileTable

FILE = "profile.json"


def default_table() -> ProfileTable:
    """Return the shipped table. Its provenance names its traces and the command that made it."""
    data = resources.files("turboserve.autoscaler.control").joinpath(FILE).read_bytes()
    return ProfileTable.parse(data)
