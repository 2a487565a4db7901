"""A Flower app around a model and data of one's own."""
