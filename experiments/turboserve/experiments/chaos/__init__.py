"""Faults on the real stack while sessions play: which invariants hold, and how fast the stack recovers."""
