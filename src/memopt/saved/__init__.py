"""Saved tensors of autograd, and how to save less: handles of tensors that can be recomputed (`memopt.recompute`).

`scope` is the context manager that saves a handle (`handles`) instead of a tensor that can be recomputed, and keeps
other tensors (`kept`, which also tells operations of PyTorch from a `torch.autograd.Function`);
`pinned` copies small saved views out of the large storages that they would keep alive;
`host` copies tensors to page-locked CPU memory;
`slots` hold tensors that a patch may replace by something smaller when their module is done. Other kept tensors may be
quantised then.
"""

from memopt.saved.scope import RecomputeScope

__all__ = ["RecomputeScope"]
