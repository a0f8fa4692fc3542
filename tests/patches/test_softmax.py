"""Attention that a model computes itself saves no probabilities, and computes the same bits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.patches.functions import patch_functions
from memopt.patches.softmax import module as softmaxes
from memopt.saved import RecomputeScope
from memopt.trace.account import account
from tests.factories import randomise_vectors_, tiny_inputs, tiny_model

HEADS, LENGTH, WIDTH = 4, 12, 3
SPAN = 2 * LENGTH
SHAPE = (2, HEADS, LENGTH, LENGTH)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float64)


MASK = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.7
MASK[..., 0] = True
ADDED = torch.zeros(MASK.shape, dtype=torch.float64).masked_fill(~MASK, -1e9)
PLACES = LENGTH + torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
BIAS = draw(2, HEADS, LENGTH, LENGTH)


class Attention(nn.Module):
    """Probabilities of queries, keys and values; `form` is what stands between the product and the softmax."""

    def __init__(self, form: Callable[[Attention, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.project = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.bias = nn.Parameter(draw(HEADS, 1, LENGTH))
        self.sinks = nn.Parameter(draw(HEADS))
        self.scale = nn.Parameter(draw(HEADS, 1, 1))
        self.positions = nn.Parameter(draw(2 * HEADS, SPAN, WIDTH))
        with torch.no_grad():
            self.project.weight.copy_(draw(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        self.given = bias
        query, key, values = self.project(x).chunk(3, -1)
        return self.form(self, query, key) @ values


def masked(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    return F.softmax(torch.matmul(query, key.transpose(-1, -2)) / 1.5 + ADDED, dim=-1)


def in_place(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    scores = query @ key.mT
    scores *= 0.5
    scores += self.given  # as large as the scores, but made before
    return scores.clamp_(min=-50).softmax(-1)


def capped(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    scores = torch.tanh(torch.matmul(query, key.mT) / 5.0) * 5.0
    return torch.softmax(torch.where(MASK, scores, torch.tensor(-1e9, dtype=torch.float64)), -1)


def of_views(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).view(SHAPE).transpose(1, 2).contiguous()
    return nn.Softmax(dim=1)(scores.permute(0, 2, 3, 1).squeeze(0) * self.scale.mT).permute(0, 3, 1, 2)[:, :HEADS]


def with_parameters(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    scores = torch.einsum("bhld,bhsd->bhls", query, key)
    return F.softmax(scores * self.scale.exp() + self.bias, -1)


def with_sinks(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    scores = torch.matmul(query, key.mT)
    sinks = self.sinks.reshape(1, -1, 1, 1).expand(2, -1, LENGTH, -1)
    scores = torch.cat([scores, sinks], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return F.softmax(scores, dim=-1)[..., :-1]


def in_fp32(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    scores = torch.matmul(query.bfloat16(), key.mT.bfloat16()).float() + ADDED.float()
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)


def rounded_in_place(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    """What is added is fp32, the sum stays bf16."""
    scores = torch.matmul(query.bfloat16(), key.mT.bfloat16())
    scores += draw(2, 1, LENGTH, LENGTH).float()
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)


def disentangled(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    """Scores of contents, and of contents and relative positions in both directions, as in DeBERTa."""
    query, key = query.flatten(0, 1), key.flatten(0, 1)
    places = PLACES.expand(2 * HEADS, -1, -1)
    bias = 0 + torch.gather(torch.bmm(query, self.positions.mT), dim=-1, index=places) / torch.tensor(1.5)
    bias += torch.bmm(key, self.positions.mT).gather(-1, places).transpose(-1, -2) / 2.5
    scores = (torch.bmm(query, key.mT / 1.5) + bias).view(SHAPE)
    return F.softmax(scores.masked_fill(~MASK, -1e9), dim=-1)


def of_two_products(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    """Each with a mask of its own, which the expression of the sum reads."""
    first = torch.where(MASK, query @ key.mT, draw(1))
    return F.softmax(first + torch.where(MASK.mT, key @ query.mT + draw(LENGTH), draw(1)), -1)


def with_frozen_keys(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    """The product saves the keys, and not the queries."""
    return F.softmax(torch.matmul(query.contiguous(), key.detach().contiguous().mT) + ADDED, -1)


FORMS = {
    form.__name__: form
    for form in (
        disentangled,
        of_two_products,
        with_frozen_keys,
        masked,
        in_place,
        capped,
        with_parameters,
        with_sinks,
        in_fp32,
        rounded_in_place,
        of_views,
    )
}


def changed_mask(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    """What was added is another one when the softmax comes."""
    mask = ADDED.clone()
    scores = torch.matmul(query, key.mT) + mask
    mask.zero_()
    return F.softmax(scores, -1)


def changed_scores(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    """The scores are changed by a function that is not followed."""
    scores = torch.matmul(query, key.mT) + ADDED
    scores.exp_()
    return F.softmax(scores, -1)


def random(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.softmax(F.dropout(torch.matmul(query, key.mT), 0.5), -1)


def with_a_large_bias(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    """It would have to be kept in place of the probabilities."""
    return F.softmax(torch.matmul(query, key.mT) + (query * key).sum(-1, keepdim=True).expand(SHAPE).exp(), -1)


def with_a_frozen_bias(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    """As large, made here of what has no gradient; nobody else would keep it."""
    return F.softmax(torch.matmul(query, key.mT) + self.given.exp(), -1)


def doubled(self: Attention, query: Tensor, key: Tensor) -> Tensor:
    """It would take eight products."""
    scores = torch.matmul(query, key.mT)
    for _ in range(3):
        scores = scores + scores.transpose(-1, -2)
    return F.softmax(scores, -1)


OTHERS = {
    form.__name__: form
    for form in (doubled, changed_mask, changed_scores, random, with_a_large_bias, with_a_frozen_bias)
}


def run(attention: Attention, *, patched: bool) -> tuple[list[Tensor], int]:
    """Output and gradients; the bytes of saved tensors of the size of the probabilities."""
    attention = copy.deepcopy(attention)
    if patched:
        patch_functions(attention, softmaxes.RecomputedSoftmaxes())
    x = draw(2, HEADS, LENGTH, WIDTH).requires_grad_()
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes if tensor.numel() >= torch.Size(SHAPE).numel() else 0)
        return tensor

    def give(tensor: Tensor) -> Tensor:
        return tensor

    for hook in (note, give):
        hook.memopt_observer = True  # type: ignore[attr-defined]
    with torch.autograd.graph.saved_tensors_hooks(note, give), RecomputeScope():
        y = attention(x, BIAS)
    gradients = torch.autograd.grad(y.square().sum(), [x, *attention.parameters()], allow_unused=True)
    return [y, *(each for each in gradients if each is not None)], sum(sizes)


@pytest.mark.parametrize("form", FORMS)
def test_bits_are_the_same_and_no_probabilities_are_saved(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    stock = softmaxes.recomputed_softmax
    monkeypatch.setattr(softmaxes, "recomputed_softmax", lambda *args: calls.append(0) or stock(*args))
    attention = Attention(FORMS[form])
    (expected, before), (found, after) = (run(attention, patched=patched) for patched in (False, True))
    assert calls == [0]
    assert len(expected) == len(found) >= 4
    assert all(map(torch.equal, expected, found))
    assert after < before


@pytest.mark.parametrize("form", OTHERS)
def test_what_cannot_be_recomputed_or_costs_as_much_is_saved_as_before(form: str) -> None:
    attention = Attention(OTHERS[form])
    (expected, before), (found, after) = (run(attention, patched=patched) for patched in (False, True))
    assert all(map(torch.equal, expected, found))
    assert after == before


@pytest.mark.parametrize(
    ("read", "apply"),
    [
        (ADDED, lambda scores, mask: scores + mask),
        ((PLACES % LENGTH).expand(2, HEADS, -1, -1), lambda scores, index: scores.gather(-1, index)),
    ],
    ids=["mask", "index of a gather"],
)
def test_a_tensor_that_is_changed_later_is_an_error_and_no_wrong_gradient(
    read: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
) -> None:
    own = read.clone()
    attention = Attention(lambda _, query, key: F.softmax(apply(torch.matmul(query, key.mT), own), -1))
    patch_functions(attention, softmaxes.RecomputedSoftmaxes())
    with RecomputeScope():
        y = attention(draw(2, HEADS, LENGTH, WIDTH), BIAS)
    own.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_scores_that_are_added_into_an_argument_are_not_added_to_what_came_of_it() -> None:
    def added(self: Attention, query: Tensor, key: Tensor) -> Tensor:
        self.given += torch.matmul(query, key.mT)
        return F.softmax(self.given, -1)

    attention, gradients = Attention(added), []
    for patched in (False, True):
        if patched:
            patch_functions(attention, softmaxes.RecomputedSoftmaxes())
        with RecomputeScope():
            y = attention(draw(2, HEADS, LENGTH, WIDTH), BIAS.clone())
        gradients += torch.autograd.grad(y.square().sum(), attention.project.weight)
    assert torch.equal(*gradients)


def test_what_is_followed_lives_no_longer_than_the_forward() -> None:
    attention = Attention(masked)
    patch_functions(attention, softmaxes.RecomputedSoftmaxes())
    with RecomputeScope():
        y = attention(draw(2, HEADS, LENGTH, WIDTH).requires_grad_(), BIAS)
    pickle.loads(pickle.dumps(y.detach()))
    assert not [name for name in vars(y) if "memopt" in name]


def test_a_module_without_a_softmax_is_looked_at_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention(lambda _, query, key: torch.matmul(query, key.mT))
    opened: list[int] = []
    stock = softmaxes._Following
    monkeypatch.setattr(softmaxes, "_Following", lambda *given: opened.append(0) or stock(*given))
    patch_functions(attention, softmaxes.RecomputedSoftmaxes())
    for _ in range(softmaxes.LOOK_AGAIN + 1):
        with RecomputeScope():
            attention(draw(2, HEADS, LENGTH, WIDTH), BIAS)
    assert len(opened) == 2


# -- models ---------------------------------------------------------------------------------------------------------

ON = memopt.load_recipe("exact-unfolded")
OFF = memopt.load_recipe("exact-unfolded", ["softmaxes.method=none"])


def eager(family: str, recipe: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    model = tiny_model(family, **settings).to(dtype)
    model.set_attn_implementation("eager")
    return memopt.patch(model, recipe)


def step(model: nn.Module, family: str, autocast: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**tiny_inputs(family, seq=32)).loss
    loss.backward()
    return [loss, *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "bert", "vit", "t5", "opt", "gpt2"])
@pytest.mark.rotates(3)
def test_models_compute_the_same_bits_from_fewer_bytes(family: str, autocast: bool) -> None:
    models = [eager(family, recipe) for recipe in (OFF, ON)]
    sites = [entry for entry in memopt.plan_for(models[1], ON).rewrites if entry.kind == "softmax"]
    assert sites
    expected, found = (step(model, family, autocast) for model in models)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    inputs = tiny_inputs(family, seq=32)
    before, after = (account(model, lambda model=model: model(**inputs)).total for model in models)
    assert after < before


@pytest.mark.parametrize("name", ["approx-4bit", "sampled"])
def test_recipes_that_approximate_something_else_compute_the_same_bits(name: str) -> None:
    recipes = [memopt.load_recipe(name, overrides) for overrides in ([], ["softmaxes.method=none"])]
    found = [step(eager("bert", recipe), "bert") for recipe in recipes]
    assert all(map(torch.equal, *found))


def test_gradients_of_the_probabilities_that_a_model_returns_are_the_same() -> None:
    found = []
    for recipe in (OFF, ON):
        model = eager("bert", recipe)
        returned = model(**tiny_inputs("bert"), output_attentions=True)
        (returned.loss + sum(each.square().sum() for each in returned.attentions)).backward()
        found.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(map(torch.equal, *found))


IDS = torch.randint(3, 99, (2, 32), generator=torch.Generator().manual_seed(1))
PADDED = torch.arange(32) < torch.tensor([[32], [20]])


def deberta(recipe: Any, *, dtype: torch.dtype = torch.float32, lora: bool = False, dropout: float = 0.0) -> nn.Module:
    """In the form of DeBERTa-v3; None for a recipe leaves it as it is."""
    config = transformers.DebertaV2Config(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, position_buckets=16, relative_attention=True, pos_att_type=["c2p", "p2c"],
        share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.DebertaV2ForMaskedLM(config)
        randomise_vectors_(model)
        if lora:
            names = ["query_proj", "value_proj"]
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, init_lora_weights=False))
            model.enable_input_require_grads()
    model.to(dtype).train()
    return model if recipe is None else memopt.patch(model, recipe)


def padded_inputs() -> dict[str, Tensor]:
    return {"input_ids": IDS, "attention_mask": PADDED.long(), "labels": IDS}


def padded_step(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**padded_inputs()).loss
    loss.backward()
    return [loss, *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.rotates(3)
def test_disentangled_attention_computes_the_same_bits(
    dtype: torch.dtype, autocast: bool, lora: bool, dropout: float
) -> None:
    models = [deberta(recipe, dtype=dtype, lora=lora, dropout=dropout) for recipe in (OFF, ON)]
    expected, found = (padded_step(model, autocast) for model in models)
    assert len(expected) == len(found) > 4
    assert all(map(torch.equal, expected, found))
    # OFF keeps dropped-out probabilities as a copy of those that their softmax keeps, ON keeps them themselves.
    tensors = 2 if dropout else 3
    saved = []
    for model in models:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            saved.append(account(model, lambda model=model: model(**padded_inputs())).total)
    config = models[0].config
    scores = 2 * config.num_attention_heads * 32 * 32 * (2 if autocast else dtype.itemsize)
    less = saved[0] - saved[1]
    assert less > 0 if lora or autocast else less == tensors * config.num_hidden_layers * scores


@pytest.mark.parametrize("lora", [False, True])
def test_disentangled_attention_has_the_gradients_of_the_stock_model(lora: bool) -> None:
    expected, found = (padded_step(deberta(recipe, dtype=torch.float64, lora=lora)) for recipe in (None, ON))
    assert len(expected) == len(found) > 4
    for one, other in zip(expected, found, strict=True):
        assert float((one - other).detach().norm()) <= 1e-9 * max(float(one.detach().norm()), 1e-6)


def test_disentangled_attention_under_checkpointing_is_exact() -> None:
    models = [deberta(recipe) for recipe in (OFF, ON)]
    for model in models:  # the reentrant kind fails in stock: all blocks share the norm of the positions
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(torch.equal, *(padded_step(model) for model in models)))


def test_models_with_fused_attention_have_nothing_to_recompute() -> None:
    assert not [entry for entry in memopt.plan_for(tiny_model("llama")).entries if entry.kind == "softmax"]


def test_dropouts_that_keep_seeds_are_called_in_the_same_module() -> None:
    """Of a dropped-out copy of the probabilities nothing is saved either."""
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    seeds = [memopt.load_recipe(recipe, ["dropouts.method=seed"]) for recipe in (OFF, ON)]
    models = [eager("bert", recipe, **dropout) for recipe in seeds]
    expected, found = (step(model, "bert") for model in models)
    assert all(map(torch.equal, expected, found))
    totals = []
    for model in models:
        torch.manual_seed(0)
        totals.append(account(model, lambda model=model: model(**tiny_inputs("bert", seq=32))).total)
    assert totals[1] < totals[0]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks_save_what_they_did(use_reentrant: bool) -> None:
    models = [eager("llama", recipe) for recipe in (OFF, ON)]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    expected, found = (step(model, "llama") for model in models)
    assert all(map(torch.equal, expected, found))


def test_a_region_checkpointed_by_hand_inside_the_module_is_exact() -> None:
    attention = Attention(lambda self, query, key: checkpoint(masked, self, query, key, use_reentrant=False))
    assert all(map(torch.equal, *(run(attention, patched=patched)[0] for patched in (False, True))))


def test_a_copy_and_a_pickle_of_the_model_do_the_same() -> None:
    model = eager("bert", ON)
    expected = step(copy.deepcopy(model), "bert")
    assert all(map(torch.equal, expected, step(pickle.loads(pickle.dumps(model)), "bert")))
    assert memopt.unpatch(model) is not None


def test_compiled_it_is_one_graph_and_the_same_gradient() -> None:
    model = eager("bert", ON)
    hidden = draw(2, 8, model.config.hidden_size).float()
    layer = model.bert.encoder.layer[0]

    def gradients(run: Callable[[Tensor], Any]) -> list[Tensor]:
        outputs = run(hidden)
        loss = (outputs if isinstance(outputs, Tensor) else outputs[0]).square().sum()
        return list(torch.autograd.grad(loss, list(layer.parameters())))

    expected = gradients(layer)
    found = gradients(torch.compile(layer, backend="aot_eager", fullgraph=True))
    largest = max(float(each.abs().max()) for each in expected)  # the gradient of keys' biases is nothing but rounding
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 * largest)


def test_capped_scores_save_neither_the_cap_nor_the_probabilities() -> None:
    attention = Attention(capped)
    (expected, before), (found, after) = (run(attention, patched=patched) for patched in (False, True))
    assert all(map(torch.equal, expected, found))
    assert after == 0 < before


def test_the_backward_of_capped_scores_can_be_repeated() -> None:
    attention = Attention(capped)
    patch_functions(attention, softmaxes.RecomputedSoftmaxes())
    with RecomputeScope():
        y = attention(draw(2, HEADS, LENGTH, WIDTH), BIAS).square().sum()
    once, twice = (torch.autograd.grad(y, attention.project.weight, retain_graph=True) for _ in range(2))
    assert torch.equal(*once, *twice)


class _Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = 5.0 * torch.tanh(self.q(x) @ self.k(x).mT / 5.0)
        return scores.softmax(-1) @ self.v(x)  # type: ignore[no-any-return]


class _CappedTwice(_Capped):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Capped()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


def test_capped_scores_inside_of_a_module_with_capped_scores() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(_CappedTwice(), _CappedTwice()), torch.randn(2, 24, 16)
    stock = copy.deepcopy(model)
    memopt.patch(model, inputs={"input": x})
    for each in (stock, model):
        each(x).square().sum().backward()
    for (name, one), other in zip(stock.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=name)
