"""The embedded stack: which servers and services there are, and how they are wired."""
