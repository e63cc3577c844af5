"""Sessions beyond a worker's slabs: how many a worker serves, and what their returns take."""
