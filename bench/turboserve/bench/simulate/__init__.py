"""Deterministic simulation: the services' real cores on a virtual clock, a bad network, and invariants."""
