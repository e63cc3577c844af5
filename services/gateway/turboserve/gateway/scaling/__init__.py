"""REST resources for the size of the pool, its orders and its cost."""
