"""`python -m octavo`, for launchers of modules: `torchrun -m octavo train run.toml`."""

import sys

if __name__ == "__main__":
    try:
        from octavo.cli import main

        code = main()
    except KeyboardInterrupt:  # during the imports of the command line
        import os

        from octavo.errors import EXIT_INTERRUPTED, warn

        if "RANK" not in os.environ:
            warn("interrupted.")
        code = EXIT_INTERRUPTED
    sys.exit(code)
