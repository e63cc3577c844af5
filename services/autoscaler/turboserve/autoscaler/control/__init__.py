"""How many workers there shall be: a pure core that is told what happens and says how many, and why."""
