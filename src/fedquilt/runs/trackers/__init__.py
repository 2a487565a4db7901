"""Trackers: callbacks that send the numbers of a run elsewhere."""
