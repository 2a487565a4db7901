"""A run: a directory, the loop that fills it, and what can be taken out of it."""
