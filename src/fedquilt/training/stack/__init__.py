"""Nets of one shape that train in one pass: their tensors stacked, each with its own batches."""
