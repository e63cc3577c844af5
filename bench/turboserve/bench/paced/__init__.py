"""Workers with a declared device, for runs of the real stack on a machine without GPUs."""
