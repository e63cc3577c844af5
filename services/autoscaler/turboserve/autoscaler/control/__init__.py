"""The autoscaling controller: decides how many workers a pool should have, and why. No clock, no I/O."""
