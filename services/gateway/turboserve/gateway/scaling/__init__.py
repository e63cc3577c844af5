"""How many workers there are and why, what is ordered of the pool, and what it all costs."""
