"""The state store in small: its own rules, in transactions on tables in memory, and what follows them."""
