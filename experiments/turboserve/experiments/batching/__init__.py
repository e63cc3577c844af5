"""Gather policies compared on a virtual clock."""
