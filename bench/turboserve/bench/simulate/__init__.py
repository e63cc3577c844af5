"""The product's own services on virtual time: processes, faults, users, and the invariants that must hold."""
