"""Tables and figures of papers, measured again: one folder of settings each, one command each."""
