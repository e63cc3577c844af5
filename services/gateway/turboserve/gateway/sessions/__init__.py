"""Sessions over REST: create, read, list, prompt, pause, resume, end."""
