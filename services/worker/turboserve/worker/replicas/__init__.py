"""Models as the replicas that an engine runs."""
