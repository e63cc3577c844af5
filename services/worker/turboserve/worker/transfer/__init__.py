"""The data plane of live migration: copies a session's pages from one worker's memory to another's.

- `links` has the backends behind one interface.
- `channel` carries headers and digests beside them, once `handshake` has shown each side that the other holds
  the migration's key.
- `source` and `target` are the two roles.

This package does not depend on the bus, the session table or the engine's internals.
"""
