"""Tests of memopt under other people's trainers and quantised linears; `make test-train` has the environment."""

from importlib.util import find_spec

if find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]
