"""Weights from other workers: the manifest between two workers, and the plan of a transfer."""
