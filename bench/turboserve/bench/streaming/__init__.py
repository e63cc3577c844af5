"""Viewers of a running stack: a virtual player, the client that feeds it, and their measurements."""
