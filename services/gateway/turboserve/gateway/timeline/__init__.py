"""Where playback is, for every session that someone watches."""
