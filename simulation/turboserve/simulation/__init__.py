"""The services' own processes on virtual time, against servers in memory: faults, users, invariants."""
