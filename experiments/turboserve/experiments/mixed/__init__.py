"""Sessions of several classes on workers of several kinds: shares, composition and their baselines."""
