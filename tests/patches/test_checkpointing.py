"""Activation checkpointing as a recipe's levels of blocks."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.errors import RecipeError
from memopt.patches.checkpointing.module import BlockRewrite, patch_block
from memopt.patches.checkpointing.offload import InputsOfThreads, OffloadedInputs
from memopt.patches.swap import state_of
from memopt.plan.recipe import Recipe, load_recipe
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import step_gradients

LAYERS = 4
FULL = "method=full"


def recipe(*settings: str) -> Recipe:
    return load_recipe("exact-unfolded", [f"checkpointing.{setting}" for setting in settings])


def model_of(name: str = "llama", **overrides) -> nn.Module:
    layers = {"llama": "num_hidden_layers", "bert": "num_hidden_layers", "gpt2": "n_layer"}.get(name)
    return tiny_model(name, torch.float64, **({layers: LAYERS} if layers else {}), **overrides)


def worst(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient; one that is zero but for rounding (a key's bias) is
    compared with a millionth of the largest."""
    assert ours.keys() == stock.keys()
    least = 1e-6 * max(each.norm() for each in stock.values())
    return max(float((ours[name] - each).norm() / each.norm().clamp(min=least)) for name, each in stock.items())


@pytest.fixture
def runs(monkeypatch):
    """Counts calls of attention: one for each forward of a block, in backward too."""
    counted, attention = [0], torch.nn.functional.scaled_dot_product_attention

    def counting(*args, **kwargs):
        counted[0] += 1
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)

    def again(model: nn.Module, inputs: dict[str, Tensor]) -> int:
        """How many blocks run again in a step."""
        counted[0] = 0
        loss = model(**inputs).loss
        forward = counted[0]
        loss.backward()
        return counted[0] - forward

    return again


def is_checkpointed(block: nn.Module) -> bool:
    rewrite = state_of(block, BlockRewrite)
    return rewrite is not None and rewrite.is_checkpointed


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ([FULL], [0, 1, 2, 3]),
        (["method=every-n"], [0, 2]),
        (["method=every-n", "n=3"], [0, 3]),
        (["method=count", "count=3"], [0, 1, 2]),
        (["method=count", "count=0"], []),
        ([FULL, "blocks=['model.layers.[12]']"], [1, 2]),
        (["method=none"], []),
    ],
)
def test_as_many_blocks_run_again_as_the_recipe_says(runs, settings, blocks):
    model = memopt.patch(model_of(), recipe(*settings))
    assert [i for i, layer in enumerate(model.model.layers) if is_checkpointed(layer)] == blocks
    assert runs(model, tiny_inputs("llama")) == len(blocks)
    model.eval()
    assert runs(model, tiny_inputs("llama")) == 0


# The loss of a language model is in fp32 whatever the dtype of its logits, as are some norms and scores of attention.
@pytest.mark.parametrize(("name", "limit"), [("llama", 1e-6), ("bert", 1e-12), ("gpt2", 1e-6), ("t5", 1e-6)])
@pytest.mark.parametrize("settings", [[FULL], ["method=every-n"], [FULL, "offload=input"]])
@pytest.mark.rotates(3)
def test_gradients_are_the_stock_models(name, limit, settings):
    stock, inputs = model_of(name), tiny_inputs(name)
    patched = memopt.patch(copy.deepcopy(stock), recipe(*settings))
    assert worst(step_gradients(patched, inputs), step_gradients(stock, inputs)) <= limit


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_blocks_may_run_again_in_another_thread_as_on_a_gpu(name):
    """Its nodes have sequence numbers of their own, and no mode of the forward's thread is active there."""
    stock, inputs = model_of(name), tiny_inputs(name)
    patched = memopt.patch(copy.deepcopy(stock), recipe("method=every-n"))
    loss = patched(**inputs).loss
    with ThreadPoolExecutor(1) as thread:
        thread.submit(loss.backward).result()
    found = {name: p.grad for name, p in patched.named_parameters() if p.grad is not None}
    assert worst(found, step_gradients(stock, inputs)) <= 1e-12


def test_a_dropout_drops_the_same_when_its_block_runs_again():
    stock, inputs = model_of("bert", hidden_dropout_prob=0.3), tiny_inputs("bert")
    patched, results = memopt.patch(copy.deepcopy(stock), recipe(FULL)), []
    for model in (patched, stock):
        torch.manual_seed(1)
        results.append(step_gradients(model, inputs))
    assert worst(*results) <= 1e-12


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_users_own_switch_neither_doubles_nor_undoes_the_levels(runs, when):
    model, inputs = model_of(), tiny_inputs("llama")
    if when == "before":
        model.gradient_checkpointing_enable()
    memopt.patch(model, recipe("method=count", "count=1"))
    if when == "after":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    assert runs(model, inputs) == 1
    assert "for 3 of them against it" in str(memopt.summary(model))
    assert "4 blocks: 1 checkpointed, 3 left" in str(memopt.summary(model))
    memopt.unpatch(model)
    assert runs(model, inputs) == LAYERS
    model.gradient_checkpointing_disable()
    assert runs(model, inputs) == 0


def test_unpatched_blocks_have_no_switch_of_their_own(runs):
    model = memopt.unpatch(memopt.patch(model_of(), recipe(FULL)))
    assert not any("gradient_checkpointing" in vars(layer) for layer in model.model.layers)
    assert runs(model, tiny_inputs("llama")) == 0


def test_summary_says_what_the_model_was_switched_to(runs):
    model = memopt.patch(model_of())
    assert "activation checkpointing" not in str(memopt.summary(model))
    model.gradient_checkpointing_enable()
    assert runs(model, tiny_inputs("llama")) == LAYERS
    assert "activation checkpointing of 4 modules" in str(memopt.summary(model))


def test_the_trainers_switch_changes_nothing(runs, tmp_path):
    from transformers import Trainer, TrainingArguments

    model, inputs = memopt.patch(model_of(), recipe("method=count", "count=2")).float(), tiny_inputs("llama")
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, gradient_checkpointing=True, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{key: value[i] for key, value in inputs.items()} for i in range(2)]
    Trainer(model, arguments, train_dataset=rows).train()
    assert runs(model, inputs) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_same_levels(runs, copied):
    model, inputs = memopt.patch(model_of(), recipe("method=every-n", "offload=input")), tiny_inputs("llama")
    twin = copied(model)
    assert runs(twin, inputs) == 2
    assert worst(step_gradients(twin, inputs), step_gradients(model, inputs)) == 0


#: Calls of each block. Not an attribute: a block that runs again leaves its own counters as they were.
_calls: Counter[nn.Module] = Counter()


class _Block(nn.Module):
    """A block that transformers knows nothing of."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        _calls[self] += 1
        return x + self.down(self.act(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self, **block) -> None:
        super().__init__()
        self.layers, self.around = nn.ModuleList(_Block(**block) for _ in range(3)), None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.around is None else self.around(layer, x)
        return x.square().sum()


@pytest.mark.parametrize("around", [None, True, False])
def test_blocks_without_a_switch_are_wrapped(around):
    """... once, where somebody checkpoints them already, reentrant or not."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    model = _Model().double()
    stock = torch.autograd.grad(model(x), [x, *model.parameters()])
    model = memopt.patch(model, recipe("method=count", "count=2"), inputs={"x": x.detach()})
    if around is not None:
        model.around = functools.partial(checkpoint, use_reentrant=around)
    _calls.clear()
    model(x).backward()
    assert [_calls[layer] for layer in model.layers] == ([2, 2, 1] if around is None else [2, 2, 2])
    for ours, expected in zip([x, *model.parameters()], stock, strict=True):
        assert torch.allclose(ours.grad, expected, rtol=1e-12, atol=1e-12)


class _Cached(_Block):
    def forward(self, x: Tensor, cache: bool, past_key_values: list[Tensor] | None, use_cache: bool) -> Tensor:
        if past_key_values is not None and use_cache:
            past_key_values.append(x)
        return super().forward(x) * len(past_key_values or ["none"])


class Guarded(nn.Module):
    """A block whose code catches all errors of its operations: it raises another one, or computes the same again."""

    def __init__(self, falls_back: bool, caught: type[BaseException]) -> None:
        super().__init__()
        self.up, self.down, self.falls_back, self.caught = nn.Linear(64, 16), nn.Linear(16, 64), falls_back, caught

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.down(self.up(x).sigmoid())
        except self.caught as error:
            if self.falls_back:
                return self.down(self.up(x).sigmoid())
            raise ValueError("an operation failed") from error


def assert_trains_as_stock(stock: nn.Module, **settings: Any) -> None:
    stock = stock.double().train()
    ours = copy.deepcopy(stock)
    patch_block(ours, None, True, None, **settings)
    for _ in range(3):  # the first calls observe the block
        x = torch.randn(3, 64, dtype=torch.float64)
        for block in (stock, ours):
            block.zero_grad()
            block(x).square().sum().backward()
        for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("falls_back", [False, True])
@pytest.mark.parametrize("caught", [Exception, BaseException])
def test_code_that_catches_all_errors_does_not_keep_the_second_run_from_its_end(falls_back, caught):
    torch.manual_seed(0)
    assert_trains_as_stock(Guarded(falls_back, caught))


class Forces(nn.Module):
    """A block that computes a gradient in its forward, between two decisions, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).sigmoid()
        energy = h.square().sum()
        largest = h.detach().argmax(-1, keepdim=True)
        (force,) = torch.autograd.grad(energy, self.up.bias, retain_graph=True)
        smallest = (-h.detach()).argmax(-1, keepdim=True)
        return self.down(h) * (largest - 2 * smallest) + force


@pytest.mark.parametrize("keeps_attention", [False, True])
def test_a_block_may_compute_gradients_in_its_forward(keeps_attention):
    torch.manual_seed(0)
    assert_trains_as_stock(Forces(), keeps_attention=keeps_attention)


def test_a_cache_that_is_passed_by_position_is_switched_off_too():
    block, written = _Cached().double().train(), []
    patch_block(block, None, True, None)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    block(x, True, written, True).sum().backward()
    assert not written
    with torch.no_grad():
        block(x, True, written, True)
    assert len(written) == 1


@pytest.mark.parametrize(("model_type", "which"), [("llama", FULL), ("gpt2", FULL), ("llama", "method=every-n")])
def test_a_text_in_chunks_through_one_cache_is_an_error(model_type, which):
    model = memopt.patch(model_of(model_type), recipe(which)).train()
    first, second = tiny_inputs(model_type)["input_ids"].tensor_split(2, dim=1)
    output = model(first, use_cache=True)
    with pytest.raises(RuntimeError, match="got one cache twice in training"):
        model(second, past_key_values=output.past_key_values)
    model(first, use_cache=True)
    with torch.no_grad():  # nothing is checkpointed
        cache = model(first, use_cache=True).past_key_values
        model(second, past_key_values=cache)


def test_chunks_after_a_prompt_without_gradients_are_those_of_stock():
    stock, tokens = model_of(), tiny_inputs("llama")["input_ids"]
    patched = memopt.patch(copy.deepcopy(stock), recipe(FULL))
    first, second = tokens.tensor_split(2, dim=1)
    found = []
    for model in (stock, patched):
        with torch.no_grad():
            cache = model(first, use_cache=True).past_key_values
        model(second, past_key_values=cache, labels=second).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert worst(found[1], found[0]) < 1e-6


def test_a_weight_that_is_pruned_before_backward_is_the_one_of_the_forward():
    """Pruning puts a plain attribute in the place of the parameter, which it renames."""
    stock, inputs, found = model_of("gpt2"), tiny_inputs("gpt2"), []
    patched = memopt.patch(copy.deepcopy(stock), "exact-levels")
    for model in (stock, patched):
        loss = model(**inputs).loss
        prune.l1_unstructured(model.transformer.h[0].mlp.c_fc, "weight", 0.5)
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert worst(found[1], found[0]) < 1e-6


def test_the_cache_of_a_sliding_window_holds_no_states_at_first(runs):
    model = memopt.patch(tiny_model("mistral"), recipe(FULL))
    assert runs(model, tiny_inputs("mistral")) == model.config.num_hidden_layers  # `use_cache` is on by default


class _OwnStatistics(nn.Module):
    """A batch norm of one's own: PyTorch updates its statistics without a change of their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("variance", torch.ones(16))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.batches.data += 1
        return torch.nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d, functools.partial(nn.BatchNorm1d, momentum=None), lambda _: _OwnStatistics()]
)
@pytest.mark.parametrize("unfrozen_at", [0, 3])
def test_batch_norms_count_each_batch_once(norm, unfrozen_at):
    torch.manual_seed(0)
    stock = _Model()
    for layer in stock.layers:
        layer.norm = norm(16)
    patched = memopt.patch(copy.deepcopy(stock.double()), recipe(FULL), inputs={"x": torch.randn(7, 16).double()})
    is_own = isinstance(stock.layers[0].norm, _OwnStatistics)
    for step in range(5):
        first, second = torch.randn(2, 7, 16, dtype=torch.float64)
        for model in (stock, patched):
            model.train()
            for layer in model.layers:
                layer.norm.train(is_own or step >= unfrozen_at)
            model.zero_grad()
            _calls.clear()
            loss, later = model(first), model(second)
            loss.backward(retain_graph=True)
            loss.backward()
            later.backward()
            assert {_calls[layer] for layer in model.layers} == {2 if model is stock else 5}
        ours, expected = ({n: p.grad for n, p in model.named_parameters()} for model in (patched, stock))
        assert worst(ours, expected) < 1e-12
        for ours, expected in zip(patched.buffers(), stock.buffers(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-14)


def test_a_compiled_block_with_a_batch_norm_runs_once():
    x, model = torch.randn(7, 16), _Model(batch_norm=True)
    expected = copy.deepcopy(model)
    expected(x).backward()
    memopt.patch(model, recipe(FULL), inputs={"x": x})
    with pytest.warns(UserWarning, match="a second run would count batches again"):
        torch.compile(model, backend="aot_eager")(x).backward()
    for ours, stock in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, stock)


def test_a_block_that_waits_for_other_processes_is_left_with_the_reason():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(_Model(batch_norm=True))
    with pytest.warns(UserWarning, match="waits for the other processes"):
        memopt.patch(model, recipe(FULL), inputs={"x": torch.randn(7, 16)})


def test_an_offloaded_input_is_a_copy_and_the_original_is_freed():
    originals: list[weakref.ref] = []
    inputs, x = OffloadedInputs(), torch.randn(3, 4, requires_grad=True)

    def step(hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.sin() * mask

    hidden, mask = x * 2, torch.ones(3, 4)
    for _ in range(2):
        originals.append(weakref.ref(hidden.untyped_storage()))
        with inputs.of_a_block().hooks():
            hidden = checkpoint(step, hidden, mask, use_reentrant=False)
    loss = hidden.sum()
    del hidden
    gc.collect()
    assert [original() for original in originals] == [None, None]
    loss.backward()
    y = (2 * x).detach()
    assert torch.allclose(x.grad, 2 * y.cos() * y.sin().cos())


@pytest.mark.parametrize("keeps_attention", [False, True])
def test_a_patched_block_does_not_hold_an_input_that_is_offloaded(keeps_attention):
    class Block(nn.Module):
        def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
            q = (hidden.sin() * mask)[None, None]
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)[0, 0].exp()

    blocks, inputs = [Block().train() for _ in range(2)], InputsOfThreads()
    for block in blocks:
        patch_block(block, None, True, inputs, keeps_attention)
    hidden, originals = torch.randn(3, 4, requires_grad=True) * 2, []
    for block in blocks:
        originals.append(weakref.ref(hidden.untyped_storage()))
        hidden = block(hidden, torch.ones(3, 4))
    loss = hidden.sum()
    del hidden
    gc.collect()
    assert [original() for original in originals] == [None, None]
    loss.backward()


def test_a_wrong_copy_of_an_input_would_be_seen(monkeypatch):
    right = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda self, other, **options: right(self, other * 1.001, **options))
    stock, inputs = model_of("bert"), tiny_inputs("bert")
    patched = memopt.patch(copy.deepcopy(stock), recipe(FULL, "offload=input"))
    assert worst(step_gradients(patched, inputs), step_gradients(stock, inputs)) > 1e-5


def test_a_count_without_a_number_is_an_error():
    with pytest.raises(RecipeError, match="'count' needs the number of blocks"):
        recipe("method=count")
    with pytest.raises(RecipeError, match="cannot be 'some'"):
        recipe("method=some")


def test_a_pattern_that_matches_no_block_is_noted():
    plan = memopt.plan_for(model_of(), recipe(FULL, "blocks=['nothing.*']"))
    assert any("'nothing.*' matches no block" in note for note in plan.notes)


def test_recipes_that_do_not_use_it_show_no_rows():
    assert "checkpointing" not in memopt.plan_for(model_of()).counts()


def test_generation_in_training_mode_has_its_cache():
    stock, tokens = model_of(), tiny_inputs("llama")["input_ids"]
    patched = memopt.patch(copy.deepcopy(stock), recipe("method=every-n"))
    for model in (stock, patched):
        model.train()
    found, expected = (m.generate(tokens, max_new_tokens=8, do_sample=False) for m in (patched, stock))
    assert torch.equal(found, expected)


def test_what_waits_may_not_be_changed_before_backward():
    x, scale = torch.randn(4, requires_grad=True), torch.ones(4)
    with OffloadedInputs().of_a_block().hooks():
        y = checkpoint(torch.mul, x, scale, use_reentrant=False)
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_block_that_changes_its_input_does_not_run_again_from_the_changed_one():
    def block(x):
        return x.mul_(2).exp()

    x = torch.randn(4, requires_grad=True)
    with OffloadedInputs().of_a_block().hooks():
        y = checkpoint(block, x * 1, use_reentrant=False).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("settings", [[FULL], ["method=every-n"]])
def test_adapters_leave_embeddings_that_a_model_changes_in_place_alone(settings):
    """PEFT makes them require gradients where it sees the model's own switch, which non-reentrant runs do not need."""
    peft = pytest.importorskip("peft")
    model = memopt.patch(model_of(), recipe(*settings))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.add_(0.5))
    assert step_gradients(adapted, tiny_inputs("llama"))


class Writes(nn.Module):
    """Blocks that change an argument in place before or after they read it; stock's autograd saves none of these."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.head = what, nn.Linear(8, 8)
        self.layers = nn.ModuleList(WritingBlock(what) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.head(x) * 2
        for layer in self.layers:
            mask = x > 0
            if self.what == "hidden states, by the model":
                hidden += layer(hidden, mask)
            elif self.what == "mask in a list":
                hidden = layer(hidden, [mask])
            elif self.what == "mask in a dictionary":
                hidden = layer(hidden, mask={"inside": (mask,)})
            elif self.what == "mask in an object":
                hidden = layer(hidden, types.SimpleNamespace(inside=[mask]))
            else:
                hidden = layer(hidden, mask=mask) if self.what == "mask by name" else layer(hidden, mask)
        return hidden


class WritingBlock(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.norm, self.up, self.down = what, nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: Tensor, mask: Any) -> Tensor:
        if not isinstance(mask, Tensor):
            (mask,) = mask if isinstance(mask, list) else mask["inside"] if isinstance(mask, dict) else mask.inside
        if "mask" in self.what:
            mask.logical_not_()
        y = self.down(self.up(self.norm(hidden * 3)).tanh()).masked_fill(mask, 0.5)
        if self.what != "hidden states":
            return hidden + y
        hidden += y
        return hidden


@pytest.mark.parametrize("what", ["mask", "mask by name", "mask in a list", "mask in a dictionary", "mask in an object",
                                  "hidden states", "hidden states, by the model", "no"])  # fmt: skip
@pytest.mark.parametrize("name", ["exact-levels", "long-context"])
def test_blocks_run_once_if_an_argument_of_theirs_is_changed_in_place(name, what):
    torch.manual_seed(0)
    stock, x = Writes(what), torch.randn(2, 5, 8)
    patched = memopt.patch(copy.deepcopy(stock), name, inputs={"x": torch.randn(2, 3, 8)})
    entries = [each for each in memopt.summary(patched).plan.entries if each.kind == "checkpointing"]
    assert ["changed in place" in each.reason for each in entries] == [what != "no"] * 3
    for _ in range(2):
        worst_error = 0.0
        for model in (stock, patched):
            model.zero_grad()
            model(x).square().sum().backward()
        for ours, theirs in zip(patched.parameters(), stock.parameters(), strict=True):
            worst_error = max(worst_error, float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
        assert worst_error <= 1e-5


class Shifts(nn.Module):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        shift += 1
        return (x * shift).sin()


def test_the_error_for_an_argument_that_the_walk_did_not_see_change_names_the_way_out():
    block = Shifts().train()
    patch_block(block, None, True, None)
    loss = block(torch.randn(2, 8, requires_grad=True), shift=torch.ones(2, 8)).sum()
    message = r"inplace operation: .*Change its arguments after.*checkpointing\.blocks, or pass use_cache=False"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_masks_that_a_block_changes_unseen_by_the_walk_are_copied():
    torch.manual_seed(0)
    stock = WritingBlock("mask by name").train()
    ours = copy.deepcopy(stock)
    patch_block(ours, None, True, None)
    for _ in range(4):  # the first two calls look at all masks
        x, mask = torch.randn(2, 8), torch.rand(2, 8) > 0.5
        results = []
        for block in (stock, ours):
            given, flags, others = x.clone().requires_grad_(), mask.clone(), ~mask
            block.zero_grad()
            loss = (block(given, mask=flags) * block(given, mask=others)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            results.append([given.grad, flags, *(parameter.grad for parameter in block.parameters())])
        for mine, its in zip(*results, strict=True):
            assert torch.allclose(mine, its, rtol=1e-5, atol=1e-6)
    assert state_of(ours, BlockRewrite).state.written == {"mask"}
