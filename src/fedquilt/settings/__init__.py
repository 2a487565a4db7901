"""Settings of a run: one schema for TOML files, command-line options and Python defaults."""
