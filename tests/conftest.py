"""What every test shares: a quiet offline environment, a small thread pool, skipped GPU tests, two pretrained models.

Tiny models come from `tests/factories.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read when transformers and tokenizers are first imported, so they are set before any test module is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Kernels are compiled (tests/aot/binary_cache.py) and models walked (tests/support/walks.py) once for their sources.
os.environ.setdefault("MEMOPT_AOT_CACHE", str(Path(__file__).parents[1] / "build" / "aot"))
os.environ.setdefault("MEMOPT_WALK_CACHE", str(Path(__file__).parents[1] / "build" / "walks"))

import pytest
import torch

import memopt
from examples.demo.fetch_models import FetchError, fetch
from tests.support.garbage import ShortCollections
from tests.support.rotation import ROTATE, left_for_other_days
from tests.support.uninitialized import poisoned
from tests.support.walks import Walks, folder_of_sources, install
from tests.zoo.share import SHARES, VARIABLE, share

# Workers of one run must collect the same types, also where a day ends between their starts.
os.environ[VARIABLE], _SHARE_FROM = map(str, share())

# Tiny tensors lose more in waking threads than they win; OMP_NUM_THREADS chooses another number.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, a pretrained Llama in bf16 (30 layers x 576), with its tokenizer."""
    return _pretrained("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2, a pretrained BERT in fp32 (6 layers x 384), with its tokenizer."""
    return _pretrained("all-MiniLM-L6-v2")


def _pretrained(name: str) -> Path:
    try:
        return fetch(name)
    except FetchError as error:
        pytest.skip(str(error))


def pytest_report_header() -> str:
    """Which model types run: one line of the header."""
    rotating = "a part of them, make test-all runs all" if os.environ.get(ROTATE) else "all"
    share = f"zoo: share {os.environ[VARIABLE]} of 0 to {SHARES - 1} ({_SHARE_FROM}); {VARIABLE}=k chooses another"
    return f"{share}; cases of rotating tests: {rotating}"


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan() -> Iterator[None]:
    """See `tests.support.uninitialized`."""
    with poisoned():
        yield


@pytest.fixture(autouse=True)
def every_document_fits_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test makes a command print as JSON is held to the published schema (tools/json_schema.py)."""
    from memopt.cli import common

    stock = common.as_json

    def checked(value: dict[str, Any]) -> str:
        from tools.json_schema import validate

        text = stock(value)
        validate(text)
        return text

    monkeypatch.setattr(common, "as_json", checked)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The CPU time of the run, in one line: this process and all that it waited for, workers included. Code that
    `tests.support.processes` runs is not in it: another process starts it."""
    terminalreporter.write_line(f"{sum(os.times()[:4]):.0f} CPU seconds")


#: Folders whose tests are about the walk, so that each of them walks for itself unless it is marked.
_WALKING = {"walk", "zoo"}
_WALKS = pytest.StashKey[Walks]()
_GARBAGE = pytest.StashKey[ShortCollections]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Share walks between tests, and keep collections of garbage short: both once all test modules are imported."""
    walks = Walks(folder_of_sources(Path(os.environ["MEMOPT_WALK_CACHE"]), Path(memopt.__file__).parent))
    install(walks)
    session.config.stash[_WALKS] = walks
    session.config.stash[_GARBAGE] = ShortCollections()


@pytest.fixture
def walks_of_run(request: pytest.FixtureRequest) -> Walks:
    """What tests of this run share."""
    return request.config.stash[_WALKS]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    walks = item.config.stash[_WALKS]
    marker = item.get_closest_marker("walks")
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    walks.enabled = marker.kwargs["shared"] if marker else folder not in _WALKING
    item.config.stash[_GARBAGE].freeze_if_slow()
    try:
        return (yield)
    finally:
        walks.enabled = False


@pytest.hookimpl(trylast=True)  # after `-m` has left out the slow ones, or a test might have none left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of other days where that is asked for, and skip what is marked `gpu` where there is none."""
    if os.environ.get(ROTATE):
        left = left_for_other_days(items, int(os.environ[VARIABLE]))
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in {*left}]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm GPU; torch finds none"))
