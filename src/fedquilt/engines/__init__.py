"""Engines take tasks to clients and bring updates back; they do no mathematics."""
