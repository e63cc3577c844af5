"""REST resources of the operators' console: the past of pools, and who waits now."""
