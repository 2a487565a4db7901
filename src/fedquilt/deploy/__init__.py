"""Fedquilt on Flower: the server's and the clients' apps, and a deployment on one machine.

``fedquilt.deploy.server_app`` and ``fedquilt.deploy.client_app`` hold the apps; any Flower project
may name them in its ``pyproject.toml``::

    [tool.flwr.app.components]
    serverapp = "fedquilt.deploy.server_app:app"
    clientapp = "fedquilt.deploy.client_app:app"
"""
