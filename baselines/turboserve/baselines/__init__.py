"""Baseline policies. Services load them by entry point, never by import."""
