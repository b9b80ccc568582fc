"""``python -m kwflow``: the command line."""

from kwflow.cli.main import main

if __name__ == "__main__":
    main()
