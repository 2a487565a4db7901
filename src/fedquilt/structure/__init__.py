"""What may be cut in a model, and how."""
