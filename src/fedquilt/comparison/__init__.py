"""Which method for these data and devices: many runs, and one table about them."""
