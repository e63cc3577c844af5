"""SQL, and nothing else: each function runs in the caller's transaction."""
