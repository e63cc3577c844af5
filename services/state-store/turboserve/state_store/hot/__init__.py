"""What lives in Redis: it may be lost at any time, and nobody's session is harmed by that."""
