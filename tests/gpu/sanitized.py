"""Launches every kernel on rows of odd and of round sizes; `test_sanitizer.py` runs it under compute-sanitizer."""

from __future__ import annotations

import torch

from tools.kernels.launches import VARIANTS, CallShape

for variant in VARIANTS:
    for hidden in (1, 100, 1000, 4096, 20001):
        for strided in (False, True):
            variant.prepare(CallShape(3, hidden, torch.bfloat16, "cuda", strided))()
torch.cuda.synchronize()
