"""Keeps the servers and services of one stack running: a pure core, and a shell that does the I/O."""
