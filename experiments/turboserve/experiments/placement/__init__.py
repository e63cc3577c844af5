"""Placement decisions: how long they take, and how far they are from the optimum."""
