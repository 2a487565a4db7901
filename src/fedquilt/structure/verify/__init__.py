"""Checks on the example that a structure is right, before anything is trained with it."""
