"""``python -m kwflow.cli.main``: the command line, as ``python -m kwflow``."""

from kwflow.cli.main import main

main()
