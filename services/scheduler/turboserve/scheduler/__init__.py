"""Decides which worker runs which session. The core is pure; the shell around it talks to the broker."""
