"""What follows a commit: the fence, the events, the word to the workers. Each is repaired if cut short."""
