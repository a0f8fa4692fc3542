"""What autograd keeps for backward, and how to keep less: handles of tensors that can be made again.

`rules` says which operations' outputs can be made again from what the operation keeps anyway;
`scope` is the context manager that puts a handle in the place of such a tensor.
"""

from memopt.saved.rules import recomputable
from memopt.saved.scope import RecomputeScope

__all__ = ["RecomputeScope", "recomputable"]
