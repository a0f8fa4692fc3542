"""`python -m memopt` is the same as `memopt`."""

from memopt.cli.main import run

if __name__ == "__main__":
    run()
