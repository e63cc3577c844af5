"""Decides which worker runs which session. The core does no I/O; the shell connects it to the broker."""
