"""Changes of tensors that no version shows: through ``.data`` or NumPy, and statistics that `F.batch_norm` updates."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from memopt.torch_compat import no_dispatch

#: Elements that are summed at once, on the CPU and elsewhere: they are all cast to fp64 for that.
_PART, _PART_ELSEWHERE = 1 << 18, 1 << 22
#: Elements of a tensor that are compared one by one, at most twice as many.
_SAMPLE = 4096


class Values:
    """The values of some tensors at one time: of each its sum and some elements, since weights may be large.

    Tensors that another object stands for (of a trace, sharded, quantised) and tensors without memory are left out.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._known = [(index, each) for index, each in enumerate(tensors) if _has_values(each)]
        self._shapes = [each.shape for _, each in self._known]
        self._before = [_digest(each) for _, each in self._known]

    def changed(self) -> list[int]:
        """Indices of the tensors that have other values now. Waits once for each device."""
        pairs: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}
        for (index, tensor), shape, was in zip(self._known, self._shapes, self._before, strict=True):
            if tensor.shape == shape and _has_values(tensor):  # sharding may have freed or exchanged its memory
                pairs.setdefault(tensor.device, []).append((index, was.to(tensor.device), _digest(tensor)))
        found: list[int] = []
        with torch.no_grad(), no_dispatch():
            for each in pairs.values():
                indices, before, now = zip(*each, strict=True)
                if not torch.equal(torch.cat(before), torch.cat(now)):
                    found += [i for i, a, b in zip(indices, before, now, strict=True) if not torch.equal(a, b)]
        return found


def _has_values(value: Tensor) -> bool:
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta or value.is_quantized:
        return False
    return value.layout is torch.strided and bool(value.untyped_storage().nbytes())


def _digest(tensor: Tensor) -> Tensor:
    """The bits of fp64 numbers that other values of `tensor` are most unlikely to have."""
    with torch.no_grad(), no_dispatch():
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        if not flat.is_floating_point() or flat.itemsize == 1:
            flat = flat.contiguous().view(torch.uint8)
        # An odd step meets every byte of integers.
        sample = flat[:: max(1, flat.numel() // _SAMPLE) | 1].double()
        parts = flat.split(_PART if flat.device.type == "cpu" else _PART_ELSEWHERE)
        sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
        return torch.cat([sums, sample]).view(torch.int64)
