"""REST resources for models and workers."""
