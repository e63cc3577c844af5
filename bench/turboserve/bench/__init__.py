"""Benchmarks of `turboserve bench NAME`. `registry` lists them, `report` writes their results."""
