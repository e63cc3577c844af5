"""The audit log: which requests are recorded, and the REST resource."""
