"""Tracks the playback of every watched session."""
