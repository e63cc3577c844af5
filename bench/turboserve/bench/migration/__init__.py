"""`turboserve bench migration`: the cost of a live migration for the viewer."""
