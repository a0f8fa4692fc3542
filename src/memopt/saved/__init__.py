"""What autograd keeps for backward, and how to keep less: handles of tensors that can be recomputed.

`rules` says which operations' outputs can be recomputed from what the operation keeps anyway;
`copies` finds such an output behind a cast, or a copy in another layout or with a border;
`versions` tells whether what was copied had been changed before;
`scope` is the context manager that puts a handle in the place of such a tensor (`handles`; all else is `kept`);
`pinned` copies small views that are kept out of the large storages that they would keep alive;
`slots` are settled when a module is done: patches exchange a tensor in a slot of theirs for something smaller, or
compress what is `compressible`;
`savers` tells what PyTorch itself saves from what somebody's function saves.
"""

from memopt.recompute_rules import recomputable
from memopt.saved.scope import RecomputeScope

__all__ = ["RecomputeScope", "recomputable"]
