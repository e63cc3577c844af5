"""The service around the engine: a pure session table, and the shell that connects it to bus and device."""
