"""Attacks on a server before any login, and the cost of the server's limits."""
