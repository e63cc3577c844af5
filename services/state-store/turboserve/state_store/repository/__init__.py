"""The repositories in SQL. Their protocols in `ports` document the methods."""
