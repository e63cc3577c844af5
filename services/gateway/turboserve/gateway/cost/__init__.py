"""REST resources for the cost of the workers."""
