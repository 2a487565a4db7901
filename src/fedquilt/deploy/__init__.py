"""Fedquilt on Flower: apps for servers and clients, and a federation on one machine."""
