"""``python -m fedquilt``: the command line."""

from fedquilt.cli import main

main()
