"""Tests of memopt in several processes; `make test-distributed` has the environment, DeepSpeed among it."""

from importlib.util import find_spec

if find_spec("deepspeed") is None:
    collect_ignore_glob = ["test_*.py"]
