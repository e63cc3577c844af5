"""REST resources for pools: their state, their orders and the table of profiled parameters."""
