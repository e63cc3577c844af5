"""The state store: the only service that uses Postgres and Redis, and that writes events and the fence."""
