"""Functions that read no value of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

_READ = """
    shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_mps is_xpu is_meta is_sparse
    is_quantized is_nested is_mkldnn itemsize nbytes names retains_grad output_nr _base
"""
_CALLED = """
    size dim numel nelement ndimension element_size is_floating_point is_complex is_signed is_contiguous stride
    get_device is_inference __len__ __hash__ storage_offset has_names is_same_size _is_view
"""
#: Attributes and functions that read no value.
METADATA = {getattr(Tensor, name).__get__ for name in _READ.split() if hasattr(Tensor, name)} | {
    getattr(owner, name) for name in _CALLED.split() for owner in (Tensor, torch) if hasattr(owner, name)
}

_LIKE = "empty_like full_like ones_like zeros_like rand_like randint_like randn_like"
_NEW = "new_empty new_full new_ones new_zeros"
#: Functions that read no value either, and make a tensor of the same shape, or of the same dtype and device.
FACTORIES = {getattr(torch, name) for name in _LIKE.split()} | {getattr(Tensor, name) for name in _NEW.split()}
