"""`python -m memopt` is the same as `memopt`."""

import os
import sys


def run() -> None:
    """Run the command line; Ctrl-C before it has started is one line too."""
    try:
        from memopt.cli.main import run as run_command
    except KeyboardInterrupt:
        print("error: Interrupted.", file=sys.stderr, flush=True)
        os._exit(130)
    run_command()


if __name__ == "__main__":
    run()
