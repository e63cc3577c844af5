"""The state store in small: its own rules, in transactions on tables in memory, with what follows a commit."""
