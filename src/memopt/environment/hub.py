"""Access to the model hub: downloads files, or says in one sentence why that fails. One request tests whether the hub
answers, and Ctrl-C can end every wait for it. No transformers here.

Without the test, a hub that accepts connections and never answers would delay every request for a file, and every
retry, until its timeout.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import huggingface_hub
from huggingface_hub import constants, errors

from memopt.errors import ModelError

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds within which the hub must answer one small request; enough for slow mirrors.
PATIENCE = 12.0
#: Seconds for which the result of such a request is reused.
_REMEMBERED = 300.0

#: Endpoint -> (time of the last request, whether it was answered).
_asked: dict[str, tuple[float, bool]] = {}


def from_hub(model: str, revision: str | None, what: str, download: Callable[..., str]) -> Path:
    """The path that `download` returns; it has the argument `local_files_only` of the hub's functions.

    Args:
        model: a hub id, as `model_folder` accepts it.
        revision: branch, tag or commit.
        what: the file or files that are fetched, in words.

    Raises:
        ModelError: the model, the revision or the file does not exist, is gated, or cannot be reached; says which.
    """
    at = f" at revision '{revision}'" if revision else ""
    page = f"{constants.ENDPOINT}/{model}"
    try:
        cached_only = not hub_answers(model, revision)
        return Path(in_thread(lambda: download(local_files_only=cached_only)))
    except errors.GatedRepoError:
        message = f"The model '{model}' on the hub is gated and this machine has no access to it."
        hint = f"Accept its terms at {page}, then log in with 'hf auth login' or set HF_TOKEN."
        raise ModelError(message, hint) from None
    except errors.RevisionNotFoundError:
        message = f"The model '{model}' on the hub has no revision '{revision}'."
        raise ModelError(message, f"See {page}/tree/main for its branches and tags.") from None
    except errors.RepositoryNotFoundError:
        message = f"'{model}' is neither an existing folder nor a model on the hub."
        raise ModelError(message, "Check the spelling; if it is private, log in with 'hf auth login'.") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why, hint = _why_offline()
        message = f"'{model}'{at} is no local folder, the hub cache has no {what} of it, and {why}."
        raise ModelError(message, hint) from None
    except errors.EntryNotFoundError:
        raise ModelError(f"'{model}' on the hub{at} is not a transformers model: it has no {what}.") from None
    except (errors.HfHubHTTPError, OSError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        message = f"The hub could not deliver the {what} of '{model}'{at}: {why}."
        raise ModelError(message, "Check the connection and try again.") from error


def _why_offline() -> tuple[str, str]:
    """Why the file was not downloaded, and what the user can do."""
    if not constants.HF_HUB_OFFLINE:
        return f"the hub at {constants.ENDPOINT} does not answer", "Check the network, or give a local folder."
    variables = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    is_set = (name for name in variables if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"})
    variable = next(is_set, variables[0])
    return f"{variable} is set, so it cannot be downloaded", f"Unset {variable}, or give a local folder."


def hub_answers(model: str, revision: str | None = None) -> bool:
    """Whether the hub answers a request about the model within `PATIENCE` seconds; false with HF_HUB_OFFLINE."""
    if constants.HF_HUB_OFFLINE:
        return False
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
    """The result or exception of `call`, run in a thread; a TimeoutError after `seconds`. Ctrl-C ends the wait at once;
    the thread may go on."""
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
