"""A page that follows runs while they go, with finished ones beside them; it only reads."""

from fedquilt.watch.app import create_app as create_app
from fedquilt.watch.reader import RunWatcher as RunWatcher
