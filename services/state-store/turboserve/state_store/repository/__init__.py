"""The repositories in SQL. Their protocols in `ports` say what each method does."""
