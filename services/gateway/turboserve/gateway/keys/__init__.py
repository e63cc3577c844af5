"""REST resources for API keys in the database."""
