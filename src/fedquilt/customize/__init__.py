"""Take a model away: the bundle a run leaves behind, and files for other programs."""
