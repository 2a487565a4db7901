"""``python -m fedquilt.cli``."""

from fedquilt.cli import main

main()
