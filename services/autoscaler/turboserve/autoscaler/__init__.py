"""Decides how many workers a pool has, and keeps them running through a pool provider."""
