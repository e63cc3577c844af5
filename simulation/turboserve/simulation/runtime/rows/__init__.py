"""The state store's database in memory: the behavior of Postgres, without any rule of the product."""
