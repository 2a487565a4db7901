"""A finished model behind HTTP: predictions at any size, and a page to try it.

``create_app`` makes an application for any ASGI server; ``fedquilt serve`` runs it.
"""

from fedquilt.serve.app import create_app as create_app
from fedquilt.serve.limits import Limits as Limits
from fedquilt.serve.model import ServedModel as ServedModel
