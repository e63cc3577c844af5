"""Decisions of the recorder, free of I/O: segments, their index, timelines, playlists, orders."""
