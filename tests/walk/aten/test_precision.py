"""Models whose code casts to fp32 compute in fp64 throughout."""

from __future__ import annotations

import torch

from memopt.walk.aten.precision import precise


def test_an_upcast_is_to_fp64_and_an_fp32_table_is_multiplied_in_fp64() -> None:
    """As rotary embeddings of older transformers do, whose table stays fp32 where a checkpoint is loaded."""
    table, places = torch.rand(1, 4, 1), torch.arange(6)[None, None]
    with precise(torch.float64):
        angles = table.to(torch.float32) @ places.float()
    assert torch.equal(angles, table.double() * places)
    assert angles.dtype == torch.float64
