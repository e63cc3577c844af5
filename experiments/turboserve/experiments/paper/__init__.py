"""TurboServe's evaluation, replayed: each table and figure beside the published numbers."""
