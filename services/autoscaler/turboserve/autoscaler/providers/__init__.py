"""Where workers run: the provider interface and its implementations."""
