"""Session events as server-sent events."""
