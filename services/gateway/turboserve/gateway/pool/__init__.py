"""REST resources for the models and workers of the pool."""
