"""Decides how many workers there are, and keeps them running through a pool provider."""
