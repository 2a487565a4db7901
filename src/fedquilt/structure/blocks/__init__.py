"""Blocks of a model that may be skipped: how they are found in its code, and taken out of it."""
