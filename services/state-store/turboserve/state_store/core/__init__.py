"""The rules of a session's row and a worker's row: record and request in, new record and events out."""
