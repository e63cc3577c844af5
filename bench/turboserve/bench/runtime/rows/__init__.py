"""The state store's database in memory: what Postgres does, and no rule of the product."""
