"""Numbers in; tables and progress out."""
