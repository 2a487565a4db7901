"""Numbers out: how good a model is at every size."""
