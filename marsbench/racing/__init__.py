"""Racing: the clock, what races on it, and what follows for the choice of a window."""
