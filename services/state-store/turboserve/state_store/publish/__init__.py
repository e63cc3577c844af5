"""Publishes committed changes: fence, events, assignments. Each is repaired after an interruption."""
