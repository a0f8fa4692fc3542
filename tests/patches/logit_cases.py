"""Programs over logits, of a stock head and of a patched one: what is done to them, written into, compared, and read.

Every operation that a patched head records or moves is followed by each alias or copy, each action, in each order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.patches.loss import plain, rows
from memopt.patches.loss.module import patch_head
from memopt.torch_compat import storage_id

BATCH, TOKENS, WIDTH, CLASSES = 2, 7, 64, 40
LABELS = torch.arange(BATCH * TOKENS) * 5 % CLASSES
_COLUMNS = torch.linspace(-1, 1, CLASSES)
_INDEX = torch.tensor([1, 0])


def in_chunks(monkeypatch: pytest.MonkeyPatch, nbytes: Callable[[Tensor], int], **sizes: int) -> None:
    """Let chunks of logits take `nbytes` of the head's input; `sizes` are ROWS and COLUMNS of blocks."""
    for module in (rows, plain):
        monkeypatch.setattr(module, "chunk_bytes", nbytes)
    for name, size in sizes.items():
        monkeypatch.setattr(plain, name, size)


#: logits -> logits
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda y: y,
    "add": lambda y: y + 0.5,
    "radd": lambda y: 0.5 + y,
    "add columns": lambda y: y + _COLUMNS.to(y.dtype),
    "add alpha": lambda y: torch.add(y, 0.5, alpha=2),
    "sub": lambda y: y - 0.5,
    "names in words": lambda y: torch.true_divide(torch.multiply(torch.subtract(y, 0.25), 2).divide(3), 0.5).negative(),
    "special log_softmax": lambda y: torch.special.log_softmax(y, -1),
    "special softmax": lambda y: torch.special.softmax(y, -1),
    "reflected": lambda y: y.__rmul__(2).__radd__(1).__rsub__(3),
    "reshape_as": lambda y: y.reshape_as(torch.empty(BATCH * TOKENS, CLASSES)),
    "swapdims": lambda y: y.swapdims(0, 1),
    "rsub": lambda y: torch.rsub(y, 0.5),
    "mul": lambda y: y * 0.25,
    "mul columns": lambda y: torch.mul(y, _COLUMNS.to(y.dtype)),
    "div": lambda y: y / 7,
    "rdiv": lambda y: 3 / (y.square() + 2),
    "neg": lambda y: -y,
    "tanh cap": lambda y: torch.tanh(y / 3) * 3,
    "sigmoid": lambda y: y.sigmoid(),
    "exp": lambda y: torch.exp(y / 4),
    "log": lambda y: torch.log(y.square() + 1),
    "pow": lambda y: torch.pow(y, 2),
    "power": lambda y: y**2,
    "square": lambda y: y.square(),
    "clamp": lambda y: y.clamp(-1, 1),
    "clip": lambda y: torch.clip(y, max=1),
    "clamp_min": lambda y: y.clamp_min(-0.5),
    "clamp_max": lambda y: y.clamp_max(0.5),
    "of two": lambda y: y.softmax(-1) * F.log_softmax(y, -1),
    "softmax": lambda y: F.softmax(y, dim=-1),
    "softmax float": lambda y: y.softmax(-1, dtype=torch.float32),
    "log_softmax": lambda y: torch.log_softmax(y, -1),
    "float": lambda y: y.float(),
    "double": lambda y: y.double(),
    "bfloat16": lambda y: y.bfloat16(),
    "half and float": lambda y: y.half().float(),
    "to float": lambda y: y.to(torch.float32),
    "to copy": lambda y: y.to(y.dtype, copy=True),
    "to copy by position": lambda y: y.to(torch.float32, False, True),
    "to device copy": lambda y: y.to("cpu", y.dtype, False, True),
    "to device": lambda y: y.to("cpu"),
    "to other": lambda y: y.to(_COLUMNS),
    "to other copy": lambda y: y.to(_COLUMNS, copy=True),
    "type": lambda y: y.type(torch.float32),
    "type_as": lambda y: y.type_as(_COLUMNS),
    "contiguous": lambda y: y.contiguous(),
    "clone": lambda y: y.clone(),
    "clone, contiguous": lambda y: torch.clone(y, memory_format=torch.contiguous_format),
    "detach": lambda y: y.detach(),
    "data": lambda y: y.data,
    "view": lambda y: y.view(-1, CLASSES),
    "view alike": lambda y: y.view(y.shape),
    "view_as": lambda y: y.view_as(y),
    "reshape": lambda y: y.reshape(BATCH * TOKENS, CLASSES),
    "flatten": lambda y: y.flatten(0, 1),
    "flatten nothing": lambda y: y.flatten(0, 0),
    "unsqueeze": lambda y: y.unsqueeze(0),
    "squeeze": lambda y: y[:1].squeeze(0),
    "narrow": lambda y: y.narrow(0, 1, 1),
    "select": lambda y: y.select(0, 1),
    "split": lambda y: y.split(1)[1],
    "chunk": lambda y: y.chunk(2)[0],
    "tensor_split": lambda y: y.tensor_split(2)[1],
    "unbind": lambda y: y.unbind(0)[1],
    "transpose": lambda y: y.transpose(0, 1),
    "transpose, contiguous": lambda y: y.transpose(0, 1).contiguous(),
    "transpose, float": lambda y: y.swapaxes(0, 1).float() * 2,
    "permute": lambda y: y.permute(1, 0, 2),
    "movedim": lambda y: y.movedim(0, 1),
    "slice": lambda y: y[:, :-1],
    "slice, reshape": lambda y: y[..., :-1, :].reshape(-1, CLASSES),
    "slice, contiguous": lambda y: y[:, 1:].contiguous(),
    "all": lambda y: y[:],
    "none": lambda y: y[None],
    "number": lambda y: y[1],
    "number in a tensor": lambda y: y[torch.tensor(1)],
    "rows": lambda y: y[:, _INDEX],
    "mask": lambda y: y[torch.tensor([[True, False] * 3 + [True]] * BATCH)],
    "columns set": lambda y: _set(y),
}
#: logits -> an alias or a copy of them, or both in turn
HANDLES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda z: z,
    "detach": lambda z: z.detach(),
    "data": lambda z: z.data,
    "no_grad view": lambda z: _without_graph(lambda: z.view(z.shape)),
    "view": lambda z: z[...],
    "first rows": lambda z: z[:1],
    "detached view": lambda z: z[:1].detach(),
    "one column": lambda z: z[..., 3],
    "float": lambda z: z.float(),
    "copy": lambda z: z.to(z.dtype, copy=True),
    "clone": lambda z: z.detach().clone(),
    "scaled": lambda z: z * 2,
    "numpy": lambda z: torch.from_numpy(z.detach().float().numpy()),
    "whole": lambda z: z.sin(),
}
#: (logits, operated, handle) -> anything: it is compared as well
ACTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "nothing": lambda y, z, h: None,
    "scale the handle": lambda y, z, h: h.mul_(2),
    "set a part of the handle": lambda y, z, h: h.__setitem__((..., 0), 0.5),
    "fill without graph": lambda y, z, h: _without_graph(lambda: h.masked_fill_(h > 0.3, -1.0)),
    "add to the logits": lambda y, z, h: y.add_(0.5),
    "set the logits": lambda y, z, h: y.__setitem__((..., [0, 2]), -2.0),
    "write into a column": lambda y, z, h: y[..., 3].detach().fill_(4.0),
    "write through data": lambda y, z, h: z.data.mul_(3),
    "a user's function": lambda y, z, h: _Doubled.apply(h),
    "a user's function of the logits": lambda y, z, h: _Doubled.apply(y),
    "a user's function that marks": lambda y, z, h: _Marked.apply(z),
    "is the largest": lambda y, z, h: z == z.max(-1, keepdim=True).values,
    "is below the third": lambda y, z, h: h < h.topk(3, dim=-1).values[..., -1:] if h.dim() > 2 else None,
    "is what was gathered": lambda y, z, h: z == z.gather(-1, torch.ones((*z.shape[:-1], 1), dtype=torch.long)),
    "is the least": lambda y, z, h: z <= z.amin(-1, keepdim=True),
    "is what was taken": lambda y, z, h: z == z.take_along_dim(z.argmin(-1, True), -1),
    "is in the rows": lambda y, z, h: y[:, 1:3].amax(-1, keepdim=True) == y[:, 1:3],
}
#: operated logits -> a number, or a tensor of a few numbers a row
READERS: dict[str, Callable[[Any], Tensor]] = {
    # A column is read first, for which the logits become whole.
    "cross_entropy": lambda z: F.cross_entropy(z.reshape(-1, CLASSES), LABELS[: z[..., 0].numel()]),
    "log-probabilities": lambda z: -z.log_softmax(-1).gather(-1, torch.ones((*z.shape[:-1], 1), dtype=torch.long)),
    "max": lambda z: z.max(-1).values,
    "logsumexp": lambda z: z.logsumexp(-1).sum(),
    "mean": lambda z: z.mean(-1),
    "min": lambda z: z.min(-1).values,
    "amin and amax": lambda z: z.amin(-1) - z.amax(-1),
    "topk": lambda z: z.topk(3, dim=-1).values,
    "sum": lambda z: z.sum(-1),
    "special logsumexp": lambda z: torch.special.logsumexp(z, -1),
    "largest and least": lambda z: z.gather(-1, z.argmax(-1, keepdim=True)) - z.take_along_dim(z.argmin(-1, True), -1),
}
#: The same, of losses that are computed in parts.
LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "cross_entropy in parts": lambda z: F.cross_entropy(z.reshape(-1, CLASSES), LABELS[: z.shape[:-1].numel()]),
    "nll_loss": lambda z: F.nll_loss(z.log_softmax(-1).reshape(-1, CLASSES), LABELS[: z.shape[:-1].numel()]),
    "kl_div": lambda z: F.kl_div(z.log_softmax(-1), torch.full(z.shape, 1 / CLASSES, dtype=z.dtype)),
    "padded": lambda z: F.cross_entropy(z[..., :-4].reshape(-1, CLASSES - 4), LABELS[: z.shape[:-1].numel()] % 36),
}
READERS |= LOSSES
ORDERS = ("before", "after", "no handle kept")
HEADS = ("plain", "tied", "bias")
DTYPES = (torch.float32, torch.bfloat16)
_ROUNDINGS = 8


@dataclass(frozen=True)
class Case:
    operation: str
    handle: str
    action: str
    reader: str
    order: str
    head: str
    dtype: torch.dtype


def cases(count: int) -> Iterator[Case]:
    """About `count` of all combinations, each value of each kind as often."""
    kinds = (OPERATIONS, HANDLES, ACTIONS, READERS, ORDERS, HEADS, DTYPES)
    generator = torch.Generator().manual_seed(count)
    chosen = [list(itertools.islice(itertools.cycle(kind), count)) for kind in kinds]
    orders = [torch.randperm(count, generator=generator).tolist() for _ in kinds]
    for index in range(count):
        case = Case(*(values[order[index]] for values, order in zip(chosen, orders, strict=True)))
        # Stock's view of a tensor with a graph has none if it was made without gradients, and says it needs one.
        is_odd = case.handle == "no_grad view" and "user" in case.action
        yield dataclasses.replace(case, action="scale the handle") if is_odd else case


class Model(nn.Module):
    """With a seed, its head is given another rounding of its input: each element is one rounding larger or smaller."""

    def __init__(self, head: str, dtype: torch.dtype, rounding: int | None = None) -> None:
        super().__init__()
        self.rounding = rounding
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH, dtype=dtype)
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, CLASSES, bias=head == "bias", dtype=dtype)
        if head == "tied":
            self.head.weight = self.embedding.weight
            nn.init.normal_(self.head.weight, std=0.2)

    def forward(self) -> Tensor:
        x = self.body(self.embedding(LABELS.view(BATCH, TOKENS)))
        if self.rounding is not None:
            up = torch.rand(x.shape, generator=torch.Generator().manual_seed(self.rounding)) < 0.5
            x = x * torch.where(up, 1 + torch.finfo(x.dtype).eps, 1 - torch.finfo(x.dtype).eps).to(x.dtype)
        logits: Tensor = self.head(x)
        return logits


def made(head: str, dtype: torch.dtype, rounding: int | None = None, *, patched: bool = True) -> Model:
    model = Model(head, dtype, rounding)
    if patched:
        patch_head(model.head, WIDTH, CLASSES)
    return model


def outcome(case: Case, patched: bool, rounding: int | None = None) -> dict[str, Any]:
    """Everything that a user can see of the case: values, gradients, memory, versions, and where which error is."""
    model = made(case.head, case.dtype, rounding, patched=patched)
    found: dict[str, Any] = {}
    try:
        loss = _run(case, model(), found)
        found["loss"] = loss.detach()
        if loss.requires_grad:
            loss.backward()
            for name, parameter in model.named_parameters():
                found[f"gradient of {name}"] = parameter.grad
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        found["error"] = type(error)
    return found


def _run(case: Case, y: Any, found: dict[str, Any]) -> Tensor:
    z = OPERATIONS[case.operation](y)
    loss = None
    if case.order == "after":
        loss = READERS[case.reader](z)
    handle = HANDLES[case.handle](z)
    result = ACTIONS[case.action](y, z, handle)
    if case.order == "no handle kept":
        del handle
    if loss is None:
        loss = READERS[case.reader](z)
    named = {"logits": y, "operated": z}
    if case.order != "no handle kept":
        named["handle"] = handle
    if isinstance(result, Tensor):
        named["result"] = result
    loss = loss.float().square().sum() if loss.dim() else loss
    found.update(_seen(case, named))
    return loss


def _seen(case: Case, named: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # What reads no value comes first.
    for name, tensor in named.items():
        odd = name == "handle" and case.handle == "no_grad view"
        found[f"{name} is"] = (tuple(tensor.shape), tensor.stride(), tensor.dtype, odd or tensor.requires_grad)
        found[f"{name} is the object"] = [other for other, each in named.items() if each is tensor]
    for name, tensor in named.items():
        found[f"version of {name}"] = tensor._version
        found[f"memory of {name}"] = [
            other
            for other, each in named.items()
            if storage_id(each.untyped_storage()) == storage_id(tensor.untyped_storage())
        ]
        found[name] = tensor.detach().as_subclass(Tensor).clone()
    return found


def wrong(case: Case, stock: dict[str, Any]) -> list[str]:
    """What the patched head shows otherwise than the stock one, which shows `stock`.

    A loss that was read in parts before a change keeps the gradient of what it read. Stock raises an error in backward
    then, or takes changed values for those that it saved where they were changed behind ``.data``.

    Products of other shapes round otherwise, and a program may amplify that: two right runs are at most twice as far
    from each other as stock's from itself with another rounding of the head's input.
    """
    ours = outcome(case, patched=True)
    # The stock loss of 16-bit logits rounds the gradient of each to 16 bits; a loss in parts does not.
    dtype = torch.bfloat16 if case.reader in LOSSES and case.operation == "bfloat16" else case.dtype
    found = differences(ours, stock, dtype)
    if found and case.order == "after" and "loss" in stock:
        unchanged = outcome(dataclasses.replace(case, action="nothing"), patched=False)
        stock = {name: each for name, each in stock.items() if not name.startswith(("gradient", "error"))}
        stock |= {name: each for name, each in unchanged.items() if name.startswith(("gradient", "error"))}
        found = differences(ours, stock, dtype)
    if not found or not all(_are_numbers(ours.get(name), stock.get(name)) for name in found):
        return found
    others = [outcome(case, patched=False, rounding=seed) for seed in range(_ROUNDINGS)]
    return [
        name for name in found if not _far(ours, stock, name) <= 2 * max(_far(each, stock, name) for each in others)
    ]


def _are_numbers(found: Any, expected: Any) -> bool:
    both = isinstance(found, Tensor) and isinstance(expected, Tensor)
    return both and found.is_floating_point() and (found.shape, found.dtype) == (expected.shape, expected.dtype)


def _far(found: dict[str, Any], stock: dict[str, Any], name: str) -> float:
    return float((found[name].double() - stock[name].double()).abs().max())


def differences(ours: dict[str, Any], stock: dict[str, Any], dtype: torch.dtype) -> list[str]:
    """What differs by more than 16 roundings of the largest element, or of 1 where larger terms cancel."""
    if ours.keys() != stock.keys():
        return [f"{sorted(ours.keys() ^ stock.keys())}: {ours.get('error')} for {stock.get('error')}"]
    return [name for name, expected in stock.items() if not _same(ours[name], expected, dtype)]


def _same(found: Any, expected: Any, dtype: torch.dtype) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return bool(found == expected)
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    largest = max(1.0, float(expected.abs().nan_to_num().amax())) if expected.numel() else 0.0
    bound = 16 * torch.finfo(dtype).eps * largest
    return torch.allclose(found.double(), expected.double(), rtol=0, atol=bound, equal_nan=True)


def _set(y: Any) -> Any:
    y[..., [1, 3]] = -3.0
    return y


def _without_graph(run: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return run()


class _Doubled(torch.autograd.Function):
    """Changes its input in place; its gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 5 * dy


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return -dy
