"""`python -m octavo`, for launchers of modules: `torchrun -m octavo train run.toml`."""

import sys

from octavo.cli import main

if __name__ == "__main__":
    sys.exit(main())
