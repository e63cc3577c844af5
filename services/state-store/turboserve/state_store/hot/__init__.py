"""Data in Redis. It may be lost at any time without harm to any session."""
