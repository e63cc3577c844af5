"""Ports: typed protocols of the servers that the state store needs. Tests implement them in memory."""
