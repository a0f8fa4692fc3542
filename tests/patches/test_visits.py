"""Rows of padding are left out of samples once they were seen to get no gradient, and never where they count."""

from __future__ import annotations

import copy
import inspect
import io
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.patches.apply import apply
from memopt.patches.sampled_linear.dataset import remember_gradients
from memopt.patches.sampled_linear.module import patch_sampled_linear
from memopt.patches.sampled_linear.padding import PaddingWatch
from memopt.patches.sampled_linear.slot import Sampling
from memopt.patches.sampled_linear.visits import INDEX, Visits, declare_index, patch_visits, visits_of
from memopt.patches.scope import ScopeRewrite, patch_scope
from memopt.patches.swap import is_swapped, unswap
from tests.factories import tiny_inputs, tiny_model

BATCH, LENGTH, WIDTH = 4, 10, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)  # nobody else holds the product


class Model(nn.Module):
    """One linear; the loss counts what `counted` says: real tokens, all, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.counted = "real"
        self.flat = False
        self.inner: Any = None
        self.before: Any = None

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, *, other_attention_mask: Any = None) -> Tensor:
        if self.before is not None:
            self.before()
        y = self.block(x.flatten(0, 1) if self.flat else x).tanh().view(x.shape[0], x.shape[1], -1)
        if self.counted == "real":
            assert attention_mask is not None
            y = y * (attention_mask != 0)[..., None]
        factor = {"none": 0.0, "overflow": float("inf")}.get(self.counted, 1.0)
        return (y * torch.linspace(1, 2, 6)).sum() * factor


def model(budget: float = 0.5) -> tuple[Model, Model]:
    """The same, stock and patched."""
    torch.manual_seed(0)
    stock = Model()
    patched = copy.deepcopy(stock)
    visits = Visits()
    patch_sampled_linear(patched.block.linear, Sampling("systematic", budget), visits, "block.linear")
    patch_scope(patched.block, ScopeRewrite(frozenset()))
    patch_visits(patched, visits)
    return stock, patched


def given(real: int = 3, left: bool = False, dtype: torch.dtype = torch.int64, seed: int = 0) -> dict[str, Tensor]:
    mask = torch.zeros(BATCH, LENGTH)
    mask[:, :real] = 1
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "attention_mask": (mask.flip(1) if left else mask).to(dtype)}


def gradient(module: Model, *args: Any, **kwargs: Any) -> Tensor:
    module.zero_grad()
    module(*args, **kwargs).backward()
    return module.block.linear.weight.grad.clone()


def error(pair: tuple[Model, Model], *args: Any, **kwargs: Any) -> float:
    stock, patched = pair
    patched_gradient = gradient(patched, *args, **kwargs)
    exact = gradient(stock, *args, **kwargs)
    return float((patched_gradient - exact).norm() / exact.norm())


def leaves_out(module: nn.Module, linear: int = 0) -> bool:
    """As the next forward will find it."""
    visits = visits_of(module)[0]
    visits.padding.settle()
    return visits.padding.leaves_out(linear)


#: The same sum over fewer rows, in another order: a few ulp.
EXACT = 16 * torch.finfo(torch.float32).eps
#: 12 of 40 rows are real; half of what is drawn otherwise is not, so some of the real ones are missing.
NOISY = 0.05


# --- what is left out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int32], ids=str)
@pytest.mark.parametrize("flat", [False, True], ids=["(B, L, d)", "(B * L, d)"])
def test_fewer_real_tokens_than_rows_are_exact_from_the_third_step_on(
    flat: bool, dtype: torch.dtype, left: bool
) -> None:
    pair = model()
    pair[0].flat = pair[1].flat = flat
    batch = given(left=left, dtype=dtype)
    errors = [error(pair, **batch) for _ in range(4)]
    assert min(errors[:2]) > NOISY
    assert max(errors[2:]) <= EXACT


def test_a_mask_without_a_name_is_found_by_its_place() -> None:
    pair, batch = model(), given()
    errors = [error(pair, *batch.values()) for _ in range(3)]
    assert errors[2] <= EXACT


def test_a_token_that_one_of_two_masks_counts_is_no_padding() -> None:
    pair, batch = model(0.2), given()
    everything = torch.ones_like(batch["attention_mask"])
    errors = [error(pair, **batch, other_attention_mask=everything) for _ in range(4)]
    assert min(errors) > NOISY
    assert not leaves_out(pair[1])


@pytest.mark.parametrize(
    "mask", [torch.ones(BATCH, LENGTH + 1), torch.ones(BATCH, 1, LENGTH), torch.zeros(BATCH, LENGTH)], ids=str
)
def test_what_is_no_mask_of_the_tokens_says_nothing(mask: Tensor) -> None:
    _, patched = model()
    patched.counted = "all"
    whole = mask.dim() != 2 or mask.shape[1] != LENGTH
    for _ in range(3):
        gradient(patched, given()["x"], other_attention_mask=mask.long() if whole else mask)
    assert patched.block.linear.weight.grad is not None
    assert not visits_of(patched)[0].padding._notes
    assert not leaves_out(patched)


def test_a_pretrained_kind_of_model() -> None:
    batch = tiny_inputs("bert", 4, 16)
    batch["attention_mask"][:, 4:] = 0
    stock, patched = tiny_model("bert"), memopt.patch(tiny_model("bert"), "sampled")
    name = "bert.encoder.layer.1.output.dense.weight"  # codes of activations come in below it
    errors = []
    for _ in range(3):
        gradients = []
        for module in (stock, patched):
            module.zero_grad()
            module(**batch).loss.backward()
            gradients.append(module.get_parameter(name).grad)
        errors.append(float((gradients[1] - gradients[0]).norm() / gradients[0].norm()))
    assert errors[0] > 10 * 64 * EXACT
    assert errors[2] <= 64 * EXACT  # the rest of the network rounds in another order, too


# --- only what does not count ----------------------------------------------------------------------------------------


def test_padding_that_counts_is_drawn_like_all_and_nobody_is_warned() -> None:
    _, patched = model()
    patched.counted = "all"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients = torch.stack([gradient(patched, **given()) for _ in range(400)])
    stock = model()[0]
    stock.counted = "all"
    exact = gradient(stock, **given())
    spread = (gradients - gradients.mean(0)).square().sum().div(400).sqrt()
    assert not leaves_out(patched)
    assert (gradients.mean(0) - exact).norm() < 4 * spread / 400**0.5


def test_padding_that_begins_to_count_is_missed_once_and_then_never_left_out_again() -> None:
    pair = model()
    for _ in range(2):
        error(pair, **given())
    for module in pair:
        module.counted = "all"
    missed = error(pair, **given())
    with pytest.warns(UserWarning, match=r"'block\.linear'.*missed them until now"):
        gradients = [gradient(pair[1], **given())]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients += [gradient(pair[1], **given()) for _ in range(399)]
        exact = gradient(pair[0], **given())
        spread = torch.stack(gradients).std(0).norm()
        assert (torch.stack(gradients).mean(0) - exact).norm() < 4 * spread / 400**0.5
        for module in pair:
            module.counted = "real"
        errors = [error(pair, **given()) for _ in range(4)]
    assert missed > 0.5  # 28 of the 40 rows
    assert min(errors) > NOISY
    assert not leaves_out(pair[1])


def test_two_quiet_gradients_have_to_follow_one_another() -> None:
    _, patched = model()
    for counted in ("real", "all", "real"):
        patched.counted = counted
        gradient(patched, **given())
    assert not leaves_out(patched)
    gradient(patched, **given())
    assert leaves_out(patched)


@pytest.mark.parametrize("counted", ["none", "overflow"])
def test_gradients_that_say_nothing_are_not_counted(counted: str) -> None:
    _, patched = model()
    patched.counted = counted
    for _ in range(3):
        gradient(patched, **given())
    assert not leaves_out(patched)
    patched.counted = "real"
    for _ in range(2):
        gradient(patched, **given())
    patched.counted = counted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(patched, **given())
        assert leaves_out(patched)


def test_batches_without_padding_say_nothing() -> None:
    _, patched = model()
    for _ in range(3):
        gradient(patched, **given(real=LENGTH))
    assert not leaves_out(patched)


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
            torch.ops.aten.is_nonzero,
        ), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_nothing_in_forward_and_backward_waits_for_the_device() -> None:
    _, patched = model()
    for _ in range(2):
        gradient(patched, **given())
    assert leaves_out(patched)  # nothing is left to settle
    with NoWaiting():
        patched(**given()).backward()
    visits_of(patched)[0].padding.settle()


# --- calls -----------------------------------------------------------------------------------------------------------


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    _, patched = model()
    visits = visits_of(patched)[0]
    with pytest.raises(RuntimeError):
        patched(**given() | {"x": torch.ones(BATCH, LENGTH, WIDTH + 1)})
    assert visits.call(0, given()["x"]) is None


def test_a_call_inside_of_a_call_has_masks_of_its_own() -> None:
    (_, outer), (_, inner), seen = model(), model(), []

    def look(module: Model) -> None:
        call = visits_of(module)[0].call(0, given()["x"])
        seen.append(None if call is None else int(call.real.sum()))

    def inside() -> None:
        look(inner)
        look(outer)

    def around() -> None:
        inner(**given(real=7))
        inside()

    inner.before, outer.before = inside, around
    outer(**given(real=3))
    assert seen == [7 * BATCH, 3 * BATCH, None, 3 * BATCH]


def test_threads_do_not_see_each_others_masks() -> None:
    _, patched = model()
    visits, barrier, seen = visits_of(patched)[0], threading.Barrier(2), {}

    def look() -> None:
        barrier.wait(10)
        call = visits.call(0, given()["x"])
        seen[threading.current_thread().name] = int(call.real.sum()) if call is not None else None

    patched.before = look
    threads = [
        threading.Thread(target=lambda n=n: patched(**given(real=n)), name=str(n))  # type: ignore[misc]
        for n in (2, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"2": 2 * BATCH, "9": 9 * BATCH}


def test_without_gradients_nothing_is_noted() -> None:
    _, patched = model()
    seen: list[Any] = []
    patched.before = lambda: seen.append(visits_of(patched)[0].call(0, given()["x"]))
    with torch.no_grad():
        patched(**given(), memopt_index=torch.arange(BATCH))
    assert seen == [None]


def test_a_compiled_model_takes_the_index_and_is_one_graph() -> None:
    stock, patched = model()
    compiled = torch.compile(patched, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**given(), memopt_index=torch.arange(BATCH)), stock(**given()))


# --- the patch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_shares_no_notes_of_samples_with_the_model(how: str) -> None:
    _, patched = model()
    for _ in range(3):
        gradient(patched, **given())
    if how == "deepcopy":
        other = copy.deepcopy(patched)
    else:
        stream = io.BytesIO()
        torch.save(patched, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    visits, own = visits_of(other)[0], visits_of(patched)[0]
    assert visits is not own
    assert leaves_out(other)
    pair = (model()[0], other)
    assert error(pair, **given()) <= EXACT
    other.counted = "all"
    gradient(other, **given())
    with pytest.warns(UserWarning, match="block"):
        assert not leaves_out(other)
    assert leaves_out(patched)


def test_a_linear_that_is_copied_by_itself_stays_in_its_model() -> None:
    stock, patched = model()
    patched.block.linear = copy.deepcopy(patched.block.linear)
    errors = [error((stock, patched), **given()) for _ in range(3)]
    assert errors[2] <= EXACT
    assert visits_of(copy.deepcopy(patched))[0] is not visits_of(patched)[0]


def test_the_index_is_named_in_the_signature_and_never_reaches_the_stock_forward() -> None:
    stock, patched = model()
    names = list(inspect.signature(patched.forward).parameters)
    assert names == [*inspect.signature(stock.forward).parameters, INDEX]
    assert INDEX not in inspect.signature(stock.forward).parameters
    assert torch.equal(patched(**given(), memopt_index=torch.arange(BATCH)), stock(**given()))
    bert = memopt.patch(tiny_model("bert"), "sampled")
    kinds = [parameter.kind for parameter in inspect.signature(bert.forward).parameters.values()]
    assert kinds == sorted(kinds)
    del type(bert).forward.__signature__  # as in a process that has read it from a pickle
    assert INDEX not in inspect.signature(bert.forward).parameters
    declare_index(bert)
    assert INDEX in inspect.signature(bert.forward).parameters


@pytest.mark.parametrize("adapters", ["before", "after"])
def test_under_peft_the_base_model_takes_the_index(adapters: str) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["query"], modules_to_save=["classifier"])
    bert: Any = tiny_model("bert")
    if adapters == "before":
        bert = get_peft_model(bert, config)
        visits = Visits()
        patch_visits(bert, visits)
    else:
        patch_visits(bert, Visits())
        bert = get_peft_model(bert, config)
    assert INDEX in inspect.signature(bert.get_base_model().forward).parameters
    batch = tiny_inputs("bert", 2, 8)
    assert torch.equal(bert(**batch, memopt_index=torch.arange(2)).loss, bert(**batch).loss)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_whose_forward_was_replaced_notes_what_the_model_without_its_head_is_given(when: str) -> None:
    """... as TRL does, whose forward calls that and computes the loss itself."""
    bert: Any = tiny_model("bert")
    own = bert.forward

    def fused(input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return nn.functional.cross_entropy(bert.classifier(bert.bert(input_ids, **kwargs).pooler_output), labels)

    plan = memopt.plan_for(bert, "sampled")
    if when == "before":
        bert.forward = fused
    applied = apply(bert, plan)
    bert.forward = fused
    assert not applied.refused
    assert INDEX in inspect.signature(bert.bert.forward).parameters
    (visits,) = visits_of(bert)
    memory = remember_gradients(bert, 2, 8)
    inputs = tiny_inputs("bert", 2, 8)
    inputs["attention_mask"][:, 5:] = 0
    for _ in range(3):
        bert(**inputs, memopt_index=torch.arange(2)).backward()
    visits.padding.settle()
    memory.flush()
    assert any(visits.padding.leaves_out(linear) for linear in range(len(visits.padding)))
    assert memory.written
    bert.forward = own
    bert(**inputs, memopt_index=torch.arange(2)).loss.backward()  # one note, of the outer call
    assert memory.calls == 4


def test_a_model_whose_forwards_were_replaced_samples_without_masks() -> None:
    bert: Any = tiny_model("bert")
    plan = memopt.plan_for(bert, "sampled")
    bert.forward, bert.bert.forward = bert.forward, bert.bert.forward
    applied = apply(bert, plan)
    assert applied.done["sampled_linear"]
    assert [name for name, reason in applied.refused if "padding" in reason] == [""]
    bert(**tiny_inputs("bert")).loss.backward()


def test_unpatch_takes_all_back() -> None:
    _, patched = model()
    unswap(patched)
    assert not is_swapped(patched)
    bert = memopt.patch(tiny_model("bert"), "sampled")
    assert visits_of(bert)
    memopt.unpatch(bert)
    assert not any(map(is_swapped, bert.modules()))
    assert INDEX not in inspect.signature(bert.forward).parameters


def test_only_a_copy_from_cuda_is_read_by_an_event_and_may_still_be_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, copy_to = [], Tensor.to

    def recorded(tensor: Tensor, *where: Any, **options: Any) -> Tensor:
        asked.append((tensor.device.type, options.get("non_blocking", False)))
        return copy_to(tensor, *where, **options)

    watch, norms = PaddingWatch(), torch.tensor([2.0, 0.0])
    watch.note(watch.add("linear"), norms, torch.tensor([True, False]), left_out=False)
    monkeypatch.setattr(Tensor, "to", recorded)
    watch.settle()
    assert asked == [("cpu", False)]
