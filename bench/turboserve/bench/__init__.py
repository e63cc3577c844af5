"""Benchmarks: what `turboserve bench NAME` runs. `registry` lists them, `report` writes what they found."""
