"""Keeps the servers and services of one stack running: a pure core and the shell around it."""
