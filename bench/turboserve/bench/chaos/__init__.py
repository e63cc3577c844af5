"""Faults on the real stack while sessions play: what holds, and how soon it recovers."""
