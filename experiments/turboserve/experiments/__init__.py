"""Evaluation of policies and of whole stacks: by replay on a virtual clock, or on a stack of its own."""
