"""Tests of memopt in several processes; `make test-distributed` has the environment, DeepSpeed among it."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.distributed.pair import Pair

if find_spec("deepspeed") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two processes that all tests of this folder share."""
    shared = Pair()
    yield shared
    shared.close()
