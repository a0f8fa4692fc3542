"""Collections of garbage that do not look again and again at what imports and finished tests have left for good.

Every count of bytes collects garbage first, and a run makes thousands: with torch and transformers loaded, each would
take a quarter of a second.
"""

from __future__ import annotations

import gc
import time
from typing import Any


class ShortCollections:
    """Takes what is alive between two tests out of later collections, when a full one has become slow."""

    #: CPU seconds of a full collection that is slow.
    SLOW = 0.02

    def __init__(self) -> None:
        self._started = 0.0
        self._is_slow = True
        gc.callbacks.append(self._time)
        self.freeze_if_slow()

    def _time(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] == 2:
            if phase == "start":
                self._started = time.thread_time()
            else:
                self._is_slow |= time.thread_time() - self._started > self.SLOW

    def freeze_if_slow(self) -> None:
        if self._is_slow:
            gc.collect()  # what is garbage now would stay forever
            gc.freeze()
            self._is_slow = False
