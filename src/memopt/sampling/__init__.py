"""Data sets that number their samples, so that sampled linears draw rows by their gradients of the last epoch.

    memopt.patch(model, "sampled")
    data = IndexedDataset(data)
    memory = remember_gradients(model, data, max_tokens=128)   # or GradientMemoryCallback() for transformers.Trainer
    print(memory)                                              # its size
    for batch in DataLoader(data, ...):
        model(**batch).loss.backward()                         # the batch holds "memopt_index"

Without remembered gradients, rows are drawn by their own norms: the gradient is unbiased too, with more noise.
"""

from typing import TYPE_CHECKING, Any

from memopt.patches.sampled_linear.dataset import IndexedDataset, remember_gradients
from memopt.patches.sampled_linear.gradient_memory import GradientMemory
from memopt.patches.sampled_linear.visits import INDEX

if TYPE_CHECKING:
    from memopt.patches.sampled_linear.trainer_callback import GradientMemoryCallback

__all__ = ["INDEX", "GradientMemory", "GradientMemoryCallback", "IndexedDataset", "remember_gradients"]


def __getattr__(name: str) -> Any:
    if name == "GradientMemoryCallback":  # on first use: it imports transformers
        from memopt.patches.sampled_linear.trainer_callback import GradientMemoryCallback

        return GradientMemoryCallback
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
