"""Downloads files from the model hub, or says in one sentence why that fails. No transformers here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import constants, errors

from memopt.environment.hub import hub_answers, in_thread
from memopt.errors import ModelError


def from_hub(model: str, revision: str | None, what: str, download: Callable[[bool], str]) -> Path:
    """The path that `download` returns; its argument is True to look in the hub's cache only.

    Args:
        model: a hub id, ``name`` or ``organisation/name``.
        revision: branch, tag or commit.
        what: the file or files that are fetched, in words.

    Raises:
        ModelError: the id, the revision or the file does not exist, is gated, or cannot be reached; says which.
    """
    at = f" at revision '{revision}'" if revision else ""
    page = f"{constants.ENDPOINT}/{model}"
    try:
        cached_only = not hub_answers(model, revision)
        return Path(in_thread(lambda: download(cached_only)))
    except errors.HFValidationError:
        message = f"'{model}' is neither an existing folder nor a hub id."
        raise ModelError(message, "A hub id is 'name' or 'organisation/name'.") from None
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
