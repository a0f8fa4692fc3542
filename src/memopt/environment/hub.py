"""Access to the model hub: one request tests whether the hub answers, and Ctrl-C can end every wait for it.

Without the test, a hub that accepts connections and never answers would delay every request for a file, and every
retry, until its timeout.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar
from urllib.parse import quote

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds within which the hub must answer one small request; enough for slow mirrors.
PATIENCE = 12.0
#: Seconds for which the result of such a request is reused.
_REMEMBERED = 300.0

#: Endpoint -> (time of the last request, whether it was answered).
_asked: dict[str, tuple[float, bool]] = {}


def hub_answers(model: str, revision: str | None = None) -> bool:
    """Whether the hub answers a request about `model`; false with HF_HUB_OFFLINE. Waits at most `PATIENCE` seconds.

    Raises:
        HFValidationError: `model` is no hub id.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    validate_repo_id(model)
    endpoint, now = constants.ENDPOINT, time.monotonic()
    when, answered = _asked.get(endpoint, (now - _REMEMBERED, False))
    if now - when >= _REMEMBERED:
        logger.info("contacting the hub at %s", endpoint)
        answered = _answers(f"{endpoint}/{model}/resolve/{quote(revision or 'main', safe='')}/config.json")
        _asked[endpoint] = (time.monotonic(), answered)
        if not answered:
            logger.info("the hub does not answer: only files in its cache can be used")
    return answered


def in_thread(call: Callable[[], T], seconds: float | None = None) -> T:
    """The result or exception of `call`, run in a thread. Ctrl-C ends the wait at once; the thread may go on.

    Raises:
        TimeoutError: the call took longer than `seconds`.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def _answers(url: str) -> bool:
    """Whether `url` returns any response, also one with an error status."""
    session = huggingface_hub.get_session()
    try:
        # The request's own timeout does not cover the name lookup, nor a response that arrives slowly byte by byte.
        in_thread(lambda: session.head(url, timeout=PATIENCE, follow_redirects=False), PATIENCE)
    except Exception:  # sessions of different libraries raise different exceptions
        return False
    return True
