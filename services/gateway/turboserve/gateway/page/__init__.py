"""The player page."""
