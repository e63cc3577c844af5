"""The embedded stack: its servers and services, and how they are connected."""
