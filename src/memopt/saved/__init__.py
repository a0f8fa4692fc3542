"""Saved tensors of autograd, and how to save less: handles of tensors that can be recomputed (`memopt.recompute`).

`scope` is the context manager that saves a handle instead of such a tensor (`handles`; all others are `kept`, which
tells what PyTorch itself saves from what somebody's function saves);
`pinned` copies small saved views out of the large storages that they would keep alive;
`slots` are settled when a module is done: patches replace the tensor in a slot of theirs by something smaller, or
quantise what is compressible.
"""

from memopt.saved.scope import RecomputeScope

__all__ = ["RecomputeScope"]
