"""Recordings over REST: start, stop, list, delete, and their video."""
