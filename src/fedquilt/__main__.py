"""``python -m fedquilt``: the command line."""

from fedquilt.cli import main

if __name__ == "__main__":
    main()
