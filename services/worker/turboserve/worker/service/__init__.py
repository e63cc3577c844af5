"""The service around the engine: a pure session table, and a shell that connects it to bus and device."""
