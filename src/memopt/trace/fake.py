"""A model on fake tensors, which have shapes and no data, and the values that its forward reads in a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memopt.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    TracingMode,
    is_operator,
    known_values,
    no_dispatch,
    set_known_values,
    storage_id,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)
from memopt.trace.emulate import grouped_product, is_grouped
from memopt.walk.aten.rules import tensors_in
from memopt.walk.models.build import numbers_in
from memopt.walk.models.plain import exchanged


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every tensor of `model` but `numbers_in` by a fake one on the CPU; tied tensors stay tied."""
    numbers = {id(number) for number in numbers_in(model).values()}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) in numbers:
            return tensor
        with mode:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")

    replace_tensors(model, fake)


def replace_tensors(model: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
    """Put `replacement` of each in place of the parameters, buffers and other tensors of all modules of `model`.

    Parameters stay parameters; tied tensors stay tied.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            twin = replacement(tensor)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            # The reference to the original keeps its id from being used again.
            made[id(tensor)] = (tensor, twin)
        return made[id(tensor)][1]

    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, Tensor):
                    table[name] = of(value)


def conversions_skipped() -> contextlib.AbstractContextManager[None]:
    """Inside, `Module.to` changes nothing where all floating tensors are as they shall be. PyTorch would swap fake ones
    for equal ones, and the graph of a checkpointed forward would lose them."""
    convert = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        tensors = [each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()]
        if tensors and all(each.to(*args, **kwargs) is each for each in tensors):
            return module
        return convert(module, *args, **kwargs)

    return exchanged([(nn.Module, "to", to)])


class Fakes(FakeTensorMode):
    """A mode for fake tensors that remembers what an operator returns for arguments of one form.

    PyTorch's cache of results takes several times as long to look up, and leaves out some views. Without symbolic sizes
    a result depends on nothing but the form, unless an argument has a value (`FakeTensor.constant`).
    """

    _known: ClassVar[dict[tuple[Any, ...], tuple[Callable[[Any], Any] | None, list[_Result]]]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tensors = kwargs or {}, list[FakeTensor]()
        form: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        is_plain = self._add(form, tensors, args) and (not kwargs or self._add(form, tensors, list(kwargs.items())))
        if not is_plain or not is_operator(func) or func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
            return self._run(func, types, args, kwargs)
        key = tuple(form)
        if (known := self._known.get(key)) is not None:
            kind, results = known
            made = [self._made(each, tensors) for each in results]
            return made[0] if kind is None else kind(made)
        if func.overloadpacket in _VIEWS and len(tensors) == 1:
            plain = _on(tensors[0].untyped_storage(), tensors[0].dtype, *_layout(tensors[0]))
            views, device = func(plain, *args[1:], **kwargs), tensors[0].fake_device
            output: Any = tree_map(lambda each: FakeTensor(self, each, device), views)
        else:
            output = self._run(func, types, args, kwargs)
        kind = tuple if isinstance(output, tuple) else list if isinstance(output, list) else None
        outputs = [output] if kind is None else output
        results = [_result(each, tensors) for each in outputs]
        made = [self._made(each, tensors) for each in results]
        first, again = list[Any](), list[Any]()
        if self._add(first, [], outputs) and self._add(again, [], made) and again == first:
            self._known[key] = kind, results
        return output

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if is_grouped(func, args):
            return grouped_product(*args, **kwargs)
        output: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _aten.native_group_norm_backward.default and output[0] is not None:
            # PyTorch's rule gives it the dtype of an fp32 weight beside a 16-bit input, its kernels that of the input.
            output = output[0].to(args[1].dtype), *output[1:]
        return output

    def _add(self, form: list[Any], tensors: list[FakeTensor], values: Iterable[Any]) -> bool:
        """Append to `form` what a result can depend on, and to `tensors` the tensors; False if a value is not plain."""
        for each in values:
            kind = type(each)
            if kind is FakeTensor:
                if each.constant is not None or each.fake_mode is not self or each.layout is not torch.strided:
                    return False
                if each.dtype.is_complex or each.is_neg() or each.is_inference():
                    return False
                tensors.append(each)
                form += _layout(each)
                form += (each.untyped_storage().nbytes(), each.dtype, each.fake_device, each.requires_grad)
            elif kind in _PLAIN:
                form += (kind, each)
            elif kind is list or kind is tuple:
                form += (kind, len(each))
                if not self._add(form, tensors, each):
                    return False
            else:
                return False
        return True

    def _made(self, result: _Result, tensors: Sequence[FakeTensor]) -> Any:
        of, value, dtype, layout = result
        if dtype is None:
            return value if of is None else tensors[of]
        if of is not None:
            return FakeTensor(self, _on(tensors[of].untyped_storage(), dtype, *layout), value)
        return FakeTensor(self, torch.empty_strided(*layout[1:], dtype=dtype, device="meta"), value)


#: A result of an operator: number of the argument whose storage it has, device, dtype and layout. Without a dtype it is
#: that argument itself, or no tensor but the value in place of the device.
_Result = tuple[int | None, Any, torch.dtype | None, tuple[Any, ...]]


def _result(output: Any, tensors: Sequence[FakeTensor]) -> _Result:
    """How to make `output` again from arguments of the same form."""
    if type(output) is not FakeTensor:
        return None, output, None, ()
    of = next((at for at, each in enumerate(tensors) if each is output), None)
    if of is not None:
        return of, None, None, ()
    storage = storage_id(output.untyped_storage())
    of = next((at for at, each in enumerate(tensors) if storage_id(each.untyped_storage()) == storage), None)
    return of, output.fake_device, output.dtype, _layout(output)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def _on(storage: torch.UntypedStorage, dtype: torch.dtype, *layout: Any) -> Tensor:
    """A tensor without memory of this layout on the storage of a fake tensor."""
    return torch.empty(0, dtype=dtype, device="meta").set_(storage, *layout)


_aten = torch.ops.aten
#: Operators that make views of one tensor. PyTorch's own code for tensors without memory is faster than for fake ones.
_VIEWS = frozenset(
    {_aten.view, _aten._unsafe_view, _aten.transpose, _aten.t, _aten.slice, _aten.expand, _aten.detach, _aten.permute,
     _aten.unsqueeze, _aten.select, _aten.split, _aten.unbind}
)  # fmt: skip
#: Types of arguments and results that are no tensors and are equal only where they mean the same.
_PLAIN = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)


#: Function -> its result for every finite number.
_OF_FINITE = {"isfinite": True, "isinf": False, "isnan": False, "isposinf": False, "isneginf": False}
#: Operations that take a list of indices.
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
#: Operations that read values: their results are values, or positions and counts of values.
_READING = (_aten._local_scalar_dense, _aten.nonzero, _aten.repeat_interleave, _aten._unique2, _aten.masked_select)
#: Operations that make zeros, and the most of them whose values are known after a scatter.
_ZEROS, _MOST_KNOWN = (_aten.zeros, _aten.zeros_like, _aten.new_zeros), 1 << 22
#: Operations that return indices of the largest elements -> (position of the argument `dim`, its default).
_PICKING = {
    torch.ops.aten.topk.default: (2, -1),
    torch.ops.aten.argmax.default: (1, None),
    torch.ops.aten.max.dim: (1, None),
}
#: Function of the result of such a test -> whether it negates that result.
_OF_TESTS = {"any": False, "all": False, "__invert__": True, "bitwise_not": True, "logical_not": True}


class FiniteValues(TorchFunctionMode):
    """While active, fake tensors count as finite where a forward branches on it (``if x.isinf().any()``: fp16 clamps).

    Shapes and saved tensors do not change; `any` and `all` over such a test return tensors with a value. Tensors that
    are computed from labels or masks alone, whose values are known, have known values too: a loss counts the labels
    that are not ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is F.ctc_loss and args and isinstance(args[0], FakeTensor):
            return _ctc_loss(*args, **kwargs)
        values = known_values(args[0]) if args else None
        if values is None and name not in _OF_FINITE and name not in _OF_TESTS:
            return func(*args, **kwargs)
        if values is not None and any(isinstance(each, Tensor) for each in tree_leaves((args[1:], kwargs))):
            values = None
        if values is not None and (name == "nonzero" or (name == "unbind" and values.dim() == 1)):  # of `tolist`
            return _with_values(func, values, args[1:], kwargs)
        output = func(*args, **kwargs)
        if not isinstance(output, FakeTensor) or not args or not isinstance(args[0], Tensor):
            return output
        if values is not None:
            with no_dispatch():
                found = func(values, *args[1:], **kwargs)
                truth = bool(found) if found.dtype == torch.bool and not found.dim() else None
            if truth is not None:
                return torch.tensor(truth)  # a fake tensor that has a value
            set_known_values(output, found)
        value = _OF_FINITE.get(name)
        if name in _OF_TESTS and (tested := self._known.get(args[0])) is not None:
            value = tested != _OF_TESTS[name]
        if value is None:
            return output
        if not output.dim():
            output = torch.tensor(value)  # a fake tensor that has a value
        self._known[output] = value
        return output


def _with_values(func: Any, values: Tensor, rest: Sequence[Any], kwargs: Any) -> Any:
    """`func` of a fake tensor with `values`, in fake tensors with values: they may decide the result's shape."""

    def fake(found: Tensor) -> Tensor:
        output = torch.empty(found.shape, dtype=found.dtype)
        set_known_values(output, found)
        return output if found.dim() else torch.tensor(found.item(), dtype=found.dtype)

    with no_dispatch():
        found = func(values, *rest, **kwargs)
    return tree_map(fake, found)


class _CTC(torch.autograd.Function):
    """The storages of PyTorch's CTC loss, which has no rule for fake tensors (native/cuda/LossCTC.cu)."""

    @staticmethod
    def forward(ctx: Any, logs: Tensor, targets: Tensor, longest: int) -> Tensor:
        steps, rows, _ = logs.shape
        loss, alpha = logs.new_empty(rows), logs.new_empty(rows, steps, 2 * longest + 1)
        ctx.save_for_backward(logs, targets, loss, alpha)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logs, _, _, alpha = ctx.saved_tensors
        beta = torch.empty_like(alpha)
        gradient = torch.empty_like(logs)
        del beta
        return gradient, None, None


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`F.ctc_loss` of fake tensors. Raises a ValueError if the targets are so long that the loss may be infinite."""
    logs = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    known = known_values(target_lengths) if isinstance(target_lengths, Tensor) else torch.tensor(target_lengths)
    width = targets.shape[-1] if targets.dim() > 1 else -(-targets.shape[0] // logs.shape[1])
    longest = width if known is None else int(known.max())
    if longest > logs.shape[0]:
        raise ValueError(f"{longest} targets may not fit in {logs.shape[0]} steps")
    loss: Tensor = _CTC.apply(logs, targets, longest)  # type: ignore[no-untyped-call]
    if zero_infinity:
        loss = torch.where(torch.isinf(loss), torch.zeros_like(loss), loss)
    if reduction == "mean":
        return (loss / torch.empty_like(loss)).mean()
    return loss.sum() if reduction == "sum" else loss


class FakeReads(TracingMode):
    """Lets a forward read values under a `FakeTensorMode` that is entered before.

    Results of real tensors alone (token ids, sizes of images) stay real, and so do integers and single numbers that
    are created from no tensor (positions); a real mask picks as many elements as are True in it. A value that a fake
    tensor lacks ("as many features as placeholders?") reads as True or 1: every element is found, and every row is
    repeated once. Indices of the largest elements (experts) are real, and each index occurs as often as the others; a
    number that is scattered to such places of zeros has its value there: the tokens of each expert are counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._zeros = WeakTensorKeyDictionary()  # fake tensor of zeros -> its version then

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        tensors = list(tensors_in((args, kwargs)))
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if fakes and packet in _INDEXED:
            args = (args[0], [each for index in args[1] for each in _places(index)], *args[2:])
        if fakes and packet in _READING:
            args, kwargs = tree_map(_plausible, (args, kwargs))
            fakes = []
        real = not fakes if tensors else _counts(func, args, kwargs)
        with unset_fake_temporarily() if real else contextlib.nullcontext():
            output = func(*args, **kwargs)
        if packet in _ZEROS and isinstance(output, FakeTensor) and output.numel() <= _MOST_KNOWN:
            self._zeros[output] = output._version
        elif len(fakes) == 1 and func is _aten.scatter.value and self._zeros.get(args[0]) == args[0]._version:
            with unset_fake_temporarily():
                set_known_values(output, torch.zeros(args[0].shape, dtype=args[0].dtype).scatter(*args[1:]))
        return _picked(func, args, kwargs, output) if fakes and func in _PICKING else output


def _plausible(leaf: Any) -> Any:
    """`leaf`; a fake tensor is replaced by its known values or, if it has none, by True or 1."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    with unset_fake_temporarily():
        known = leaf.constant if leaf.constant is not None else known_values(leaf)
        return torch.ones(leaf.shape, dtype=leaf.dtype) if known is None else known


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """Indices of the elements that `index` picks; for a mask, the positions of its True elements."""
    if index is None or index.dtype != torch.bool:
        return (index,)
    with unset_fake_temporarily():
        positions: Sequence[Tensor] = _plausible(index).nonzero(as_tuple=True)
        return positions


def _picked(func: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """`output` with real indices, which count up cyclically from row to row."""
    place, default = _PICKING[func]
    dim, size = args[place] if len(args) > place else kwargs.get("dim", default), args[0].shape
    fake = output if isinstance(output, Tensor) else output[1]
    if dim is None or not size:
        return output
    with unset_fake_temporarily():
        shape = list(fake.shape if fake.dim() == len(size) else fake.unsqueeze(dim).shape)
        shape.append(shape.pop(dim))
        places = torch.arange(fake.numel()) % size[dim]
        indices = places.reshape(shape).movedim(-1, dim).reshape(fake.shape).contiguous()
    return indices if fake is output else (output[0], indices)


def _counts(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call without tensors creates integers, or a single number."""
    if func.overloadpacket is torch.ops.aten.scalar_tensor or (args and args[0] == []):
        return True
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func.overloadpacket is torch.ops.aten.arange and all(isinstance(leaf, int) for leaf in args)
    return not (dtype.is_floating_point or dtype.is_complex)
