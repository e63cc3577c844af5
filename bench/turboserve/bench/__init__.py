"""Benchmarks of hot paths. `registry` finds those of all distributions, `report` writes their results."""
