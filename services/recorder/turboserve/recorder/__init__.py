"""Recorder: writes sessions' video from the chunk log to object storage, and serves it."""
