"""The table that ships: what `turboserve profile autoscaler` made of the family of Appendix A."""

from __future__ import annotations

from importlib import resources

from turboserve.contracts.autoscale import ProfileTable

FILE = "profile.json"


def default_table() -> ProfileTable:
    """The shipped table; its provenance says from what and by which command it was made."""
    data = resources.files("turboserve.autoscaler.control").joinpath(FILE).read_bytes()
    return ProfileTable.parse(data)
