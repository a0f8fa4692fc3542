"""Access to the model hub: one request finds out whether it answers, and memopt waits only where Ctrl-C can end the
wait.

A hub that accepts connections and stays silent would hold the request for every file, and every retry, to its timeout.
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

#: Seconds within which the hub has to answer one small request; slow mirrors do.
PATIENCE = 12.0
#: Seconds for which its answer, or its silence, counts.
_REMEMBERED = 300.0

#: Endpoint -> (when it was asked, whether it answered).
_asked: dict[str, tuple[float, bool]] = {}


def hub_answers(model: str, revision: str | None = None) -> bool:
    """Whether the hub may be asked about `model` (HF_HUB_OFFLINE) and answers; waits at most `PATIENCE` seconds.

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
    """What `call` returns or raises; Ctrl-C ends the wait at once, although the call may go on.

    Raises:
        TimeoutError: it took longer than `seconds`.
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
    """Whether anything, an error status too, comes back from `url`."""
    session = huggingface_hub.get_session()
    try:
        # The limit of the request does not hold while a name is looked up, nor for an answer that trickles in.
        in_thread(lambda: session.head(url, timeout=PATIENCE, follow_redirects=False), PATIENCE)
    except Exception:  # of whichever library the session is
        return False
    return True
