"""The state store: alone with Postgres and Redis, alone in writing events and the fence."""
