"""Traces a model on an example: which positions of which tensors form a channel."""
