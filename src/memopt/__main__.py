"""`python -m memopt` is the same as `memopt`."""

import os
import sys


def run() -> None:
    """Run the command line; Ctrl-C during its import prints one line, too, and no traceback."""
    try:
        from memopt.cli.main import run as run_command
    except KeyboardInterrupt:
        print("error: Interrupted.", file=sys.stderr, flush=True)
        os._exit(130)
    run_command()


if __name__ == "__main__":
    run()
