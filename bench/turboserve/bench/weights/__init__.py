"""Weights from other workers: makespans of plans in virtual time, and starts of real processes."""
