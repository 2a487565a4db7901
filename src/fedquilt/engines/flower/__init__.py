"""The Flower engine: runs tasks on the nodes of a Flower grid.

The apps for servers and clients are in ``fedquilt.deploy``.
"""
