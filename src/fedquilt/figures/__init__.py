"""Figures as data, and what draws them with matplotlib."""
