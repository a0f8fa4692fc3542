"""What the loss over a vocabulary costs a GPU by arithmetic: launches, products, bytes and memory of one step.

The real code runs on fake tensors that stand for a GPU's: every operation and every launch of a kernel is counted, and
every storage is followed from its allocation to its end. Time is an estimate: products at 750 TFLOP/s, or their bytes
at 3.0 TB/s where that takes longer; all other operations by their bytes; and 4 microseconds a launch. The loss's kernel
that writes a gradient reads its rows twice, the second time from the cache as far as that holds them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from memopt.patches.loss import readers
from memopt.patches.loss.module import patch_head
from memopt.torch_compat import FakeTensorMode, TorchDispatchMode, operator_schema, storage_id
from memopt.trace.emulate import CudaChoices
from memopt.trace.fake import replace_tensors
from memopt.trace.operations import operation
from memopt.trace.quantised import Linear4bit
from memopt.trace.storages import storages
from memopt.walk.aten.rules import tensors_in

FLOPS, BANDWIDTH, LAUNCH = 750e12, 3.0e12, 4e-6
#: Bytes of an H100's cache, and the rows that the loss's kernel reads at a time: two programs a multiprocessor.
CACHE, ROWS_AT_A_TIME = 50e6, 2 * 132
Kind = Literal["trained", "frozen", "fp32, autocast", "LoRA", "4 bits"]
KINDS: tuple[Kind, ...] = ("trained", "frozen", "fp32, autocast", "LoRA", "4 bits")
#: Operations that launch nothing.
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh", "alias")
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """A head and the tokens of a step."""

    model: str
    tokens: int
    hidden: int
    vocabulary: int
    cap: float | None = None
    tied: bool = True
    """The weight's gradient is then added to the embedding's, which is no part of the loss."""


MODELS = (
    Shape("Llama-8B", 8192, 4096, 128256, tied=False),
    Shape("Llama-1B", 2048, 2048, 128256),
    Shape("Llama-1B", 4096, 2048, 128256),
    Shape("Qwen3-0.6B", 4096, 1024, 151936),
    Shape("Gemma-2-2B", 4096, 2304, 256000, cap=30.0),
    Shape("SmolLM2-135M", 2048, 576, 49152),
)


@dataclass(frozen=True)
class Account:
    """One step's loss, forward and backward."""

    shape: Shape
    kind: Kind
    room: int
    """MiB, as in ``loss.room``."""
    way: str
    """Which functions computed it."""
    launches: int
    products: float
    """Of all rows, columns and inputs of the head."""
    least: int
    """Products that no exact loss can do without."""
    moved: int
    """Bytes that operations move which are no products."""
    beside: int
    """The most bytes that live beside the gradients of the head's input and of its weight."""
    seconds: float

    @property
    def ratio(self) -> float:
        """The estimated time over that of the least products."""
        return self.seconds / (self.least * product_flops(self.shape) / FLOPS)


def product_flops(shape: Shape) -> int:
    """Of one product of all rows."""
    return 2 * shape.tokens * shape.hidden * shape.vocabulary


@dataclass
class Counted(TorchDispatchMode):
    """Operations on tensors, and launches of Triton's kernels."""

    launches: int = 0
    flops: int = 0
    moved: float = 0
    seconds: float = 0.0
    live: int = 0
    peak: int = 0
    _seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.follow(result)
        found = operation(func, args, kwargs or {}, result, 0)
        name = operator_schema(func).name.rpartition("::")[2]
        is_factory = found is None and not list(tensors_in((args, kwargs))) and bool(list(tensors_in(result)))
        if name not in _FREE and (found is not None or is_factory):
            nbytes = sum(each.nbytes for each in tensors_in(result)) if found is None else found.nbytes
            self.add(nbytes, 0 if found is None else found.flops)
        return result

    def add(self, nbytes: float, flops: int = 0) -> None:
        """One launch."""
        self.launches += 1
        self.flops += flops
        self.moved += 0 if flops else nbytes
        self.seconds += LAUNCH + max(flops / FLOPS, nbytes / BANDWIDTH)

    def launch(self, kernel: Any, args: Sequence[Any]) -> None:
        """One of the loss's kernels: what it reads and writes, each once, and where it does the second read of rows."""
        nbytes: float = sum(each.nbytes for each in args if isinstance(each, Tensor))
        logits, writes = args[0], kernel.fn.__name__ == "loss_forward_kernel" and args[7] is not None
        if writes:
            at_a_time = ROWS_AT_A_TIME * logits.shape[-1] * logits.itemsize
            nbytes += logits.nbytes * (1 - min(1.0, CACHE / at_a_time))
        self.add(nbytes)

    def follow(self, result: Any) -> None:
        for storage in storages(tensors_in(result)):
            key = storage_id(storage)
            if key not in self._seen:
                self._seen.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._ended, key, storage.nbytes())

    def _ended(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    """Inside, what runs on fake tensors is counted as on a GPU."""
    from triton.runtime import JITFunction

    counted = Counted()

    def stub(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: counted.launch(kernel, args)

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, CudaChoices(), mock.patch.object(JITFunction, "__getitem__", stub), counted:
        yield counted


def account(shape: Shape, kind: Kind, room: int = 0) -> Account:
    """Run head and loss of `shape` once; `room` in MiB."""
    ways: list[str] = []

    def noted(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        return lambda *args: (ways.append(name), function(*args))[1]

    patches = {
        "loss_at_once": noted(readers.loss_at_once, "at once"),
        "losses_by_blocks": noted(readers.losses_by_blocks, "by blocks"),
        "_by_rows": noted(readers._by_rows, "by rows"),
    }
    with mock.patch.multiple(readers, **patches), counting() as counted:
        with torch.no_grad():
            x, head = _head(shape, kind)
            target = torch.zeros(shape.tokens, dtype=torch.long)
        patch_head(head, shape.hidden, shape.vocabulary, room=room * MIB)
        trained = [each for each in head.parameters() if each.requires_grad]
        before = counted.live
        counted.launches, counted.flops, counted.moved, counted.seconds, counted.peak = 0, 0, 0.0, 0.0, counted.live
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "fp32, autocast"):
            logits = head(x)
            logits = logits if shape.cap is None else torch.tanh(logits / shape.cap) * shape.cap
            loss = F.cross_entropy(logits.float(), target)
        gradients = torch.autograd.grad(loss, (x, *trained))
        own = sum(each.nbytes for each in gradients)
    products = counted.flops / product_flops(shape)
    least = 3 if kind in ("trained", "fp32, autocast") else 2
    beside = counted.peak - before - own
    return Account(
        shape, kind, room, "+".join(dict.fromkeys(ways)), counted.launches, products, least, round(counted.moved),
        beside, counted.seconds,
    )  # fmt: skip


def _head(shape: Shape, kind: Kind) -> tuple[Tensor, nn.Module]:
    dtype = torch.float32 if kind == "fp32, autocast" else torch.bfloat16
    x = torch.empty(shape.tokens, shape.hidden, dtype=dtype).requires_grad_()
    head: nn.Module = nn.Linear(shape.hidden, shape.vocabulary, bias=False, dtype=dtype)
    if kind == "4 bits":
        with torch.device("meta"):
            head = Linear4bit(nn.Linear(shape.hidden, shape.vocabulary, bias=False), dtype, True, cuda=True)
        replace_tensors(head, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    if kind in ("frozen", "LoRA"):
        head.requires_grad_(False)
    return x, Adapted(head, shape) if kind == "LoRA" else head


class Adapted(nn.Module):
    """A linear with a low-rank one beside it, as PEFT's LoRA."""

    def __init__(self, base: nn.Module, shape: Shape, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(shape.hidden, rank, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(rank, shape.vocabulary, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x)) * 2.0
        return y


def accounts() -> Iterator[Account]:
    """Of every model and kind; of trained heads also with 1 GiB."""
    for shape in MODELS:
        for kind in KINDS:
            yield account(shape, kind)
            if kind == "trained":
                yield account(shape, kind, room=1024)


#: Model, tokens, kind, room -> the most of its least products' time, of launches, of MiB beside the gradients.
LIMITS: dict[tuple[str, int, Kind, int], tuple[float, int, float]] = {
    ("Llama-8B", 8192, "trained", 1024): (1.10, 200, 1024),
    ("Llama-8B", 8192, "frozen", 0): (1.10, 200, 129),
    ("Llama-1B", 2048, "trained", 0): (1.75, 200, 73),
}


def misses(found: Sequence[Account]) -> list[str]:
    """What is above its limit, a sentence each."""
    lines = []
    for each in found:
        limits = LIMITS.get((each.shape.model, each.shape.tokens, each.kind, each.room))
        if limits is None:
            continue
        where = f"{each.shape.model}, {each.shape.tokens} tokens, {each.kind}"
        for what, value, most in zip(
            ("times its products", "launches", "MiB beside the gradients"),
            (each.ratio, each.launches, each.beside / MIB),
            limits,
            strict=True,
        ):
            if value > most:
                lines.append(f"{where}: {value:.3f} {what} (at most {most})")
    return lines


def table(found: Sequence[Account]) -> Table:
    """A line for each."""
    result = Table(title="The loss over a vocabulary, forward and backward, by arithmetic", title_justify="left")
    names = (
        "model",
        "tokens",
        "head",
        "room MiB",
        "way",
        "launches",
        "products",
        "moved GB",
        "beside MiB",
        "ms",
        "ratio",
    )
    for name in names:
        result.add_column(name, justify="left" if name in ("model", "head", "way") else "right", no_wrap=True)
    for each in found:
        shape = each.shape
        result.add_row(
            shape.model, str(shape.tokens), each.kind, str(each.room or "-"), each.way, str(each.launches),
            f"{each.products:.2f}", f"{each.moved / 1e9:.1f}", f"{each.beside / MIB:.0f}", f"{each.seconds * 1e3:.2f}",
            f"{each.ratio:.3f}",
        )  # fmt: skip
    return result


def rows(found: Sequence[Account]) -> list[dict[str, Any]]:
    """For a file."""
    return [{**asdict(each), "ratio": each.ratio} for each in found]
