"""`python -m octavo`, for launchers of modules: `torchrun -m octavo train run.toml`."""

import sys

if __name__ == "__main__":
    try:
        from octavo.cli import main

        code = main()
    except KeyboardInterrupt:  # during the imports of the command line
        from octavo.errors import EXIT_INTERRUPTED, warn

        warn("interrupted.")
        code = EXIT_INTERRUPTED
    sys.exit(code)
