"""Under autocast, what a patched module returns has the dtype and the values of the stock module's output."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import memopt
from memopt.kernels.base.autograd import autocast_dtype
from memopt.kernels.norm.function import NormFunction, ms_norm
from memopt.kernels.norm.reference import NormSpec
from memopt.patches.swap import is_swapped, unswap
from memopt.recompute.specs import shared_cast
from tests.factories import NAMES, tiny_inputs, tiny_model
from tests.support.autocast_programs import NORMS, WIDTH, OneBlock, Program

#: Of 500 programs; the first ones are run by default.
QUICK, PROGRAMS = 60, 500
BF16 = torch.bfloat16


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def trained(program: Program, x: Tensor, seed: int, *, autocast: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of input and parameters."""
    program.zero_grad()
    torch.manual_seed(seed)  # of the dropouts
    given = x.clone().requires_grad_()
    with torch.autocast("cpu", program.dtype, enabled=autocast, cache_enabled=program.cache):
        outputs = program(given)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(each.shape, generator=generator).to(program.wide) for each in outputs]
        torch.stack(
            [(each.to(program.wide) * w).sum() for each, w in zip(outputs, weights, strict=True)]
        ).sum().backward()
    return list(outputs), [each.grad for each in (given, *program.parameters()) if each.grad is not None]


def distance(found: list[Tensor], truth: list[Tensor]) -> float:
    off = sum(float((a.double() - b).square().sum()) for a, b in zip(found, truth, strict=True))
    return (off / sum(float(b.square().sum()) for b in truth)) ** 0.5


def compare(seed: int) -> tuple[float, float]:
    """The errors of both gradients, stock's first; none where there is nothing to compare."""
    stock, x = Program(seed).train(), torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
    ours = copy.deepcopy(stock)
    memopt.patch(OneBlock(ours), inputs={"x": x})
    try:
        outputs, expected = trained(stock, x, seed)
    except Exception as error:
        with pytest.raises(type(error)):
            trained(ours, x, seed)
        return 0.0, 0.0
    found_outputs, found = trained(ours, x, seed)
    _, again = trained(ours, x, seed)
    assert all(map(torch.equal, again, found))
    assert ours.seen == stock.seen
    assert [each.dtype for each in found_outputs] == [each.dtype for each in outputs]
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(map(torch.equal, ours.choices(), stock.choices()))
    exact = copy.deepcopy(stock).double()
    exact.wide = torch.float64
    _, truth = trained(exact, x.double(), seed, autocast=False)
    if not all(map(torch.equal, stock.choices(), exact.choices())):
        return 0.0, 0.0  # another function: rounding chose another expert in the stock model
    # Twice stock's error, as `memopt verify` has it, and one rounding of each norm's x_hat, which is kept in 16 bits.
    norms = sum(kind in (*NORMS, "norm without autocast") for kind, *_ in stock.steps)
    errors = distance(expected, truth), distance(found, truth)
    assert errors[1] <= 2 * errors[0] + norms * unit_roundoff(stock.dtype)
    return errors


@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, QUICK, 20)], ids=str)
@pytest.mark.rotates(3)
def test_random_programs_are_the_stock_ones(seeds: range) -> None:
    for seed in seeds:
        compare(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 44) for first in range(QUICK, PROGRAMS, 44)], ids=str)
def test_more_random_programs_are_the_stock_ones(seeds: range) -> None:
    errors = [compare(seed) for seed in seeds]
    rounds = [mine / theirs for theirs, mine in errors if theirs > torch.finfo(torch.float32).eps * 10]
    wide = max(mine for theirs, mine in errors if theirs <= torch.finfo(torch.float32).eps * 10)
    print(f"ratios: median {statistics.median(rounds):.2f}, at most {max(rounds):.2f}; in fp32 alone: {wide:.1e}")


@contextmanager
def outputs_of(model: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """Name of each module whose forward returns a tensor -> its dtype. Functions are looked at from the outside."""
    seen: dict[str, torch.dtype] = {}
    names = {id(module): name for name, module in model.named_modules()}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and id(module) in names:
            seen[names[id(module)]] = tensor.dtype

    hook = nn.modules.module.register_module_forward_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "mixtral", "whisper"])
@pytest.mark.rotates(3)
def test_every_module_returns_the_dtype_of_the_stock_one(name: str, dtype: torch.dtype) -> None:
    stock, inputs = tiny_model(name).train(), tiny_inputs(name)
    for weights in {torch.float32, dtype} - {torch.float16}:
        found = []
        for model in (stock.to(weights), memopt.patch(copy.deepcopy(stock))):
            with torch.autocast("cpu", dtype), outputs_of(model) as seen:
                model(**{key: each.to(weights) if each.is_floating_point() else each for key, each in inputs.items()})
            found.append(seen)
        theirs, mine = found
        assert len(mine) > 10
        assert mine == {key: theirs[key] for key in mine}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.read: Callable[[Tensor], object] = lambda h: None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        self.read(h)
        y: Tensor = self.a(h) + self.b(h) * self.c(h)
        return x + y


def patched_block() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16)
    block = Block().train()
    memopt.patch(OneBlock(block), inputs={"x": x})
    return block, x.requires_grad_()


def unpatched(block: Block) -> None:
    for module in block.modules():
        if is_swapped(module):
            unswap(module)


def test_linears_share_one_cast_of_a_norms_output_and_save_its_x_hat_alone() -> None:
    block, x = patched_block()
    casts = []
    block.read = lambda h: casts.append(h)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    pack.memopt_observer = True  # type: ignore[attr-defined]
    with torch.autocast("cpu", BF16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x)
        cast = shared_cast(casts[0], autocast_dtype)
        assert shared_cast(casts[0], lambda _: None) is casts[0]
    assert casts[0].dtype is torch.float32
    assert cast.dtype is BF16
    storages = {each.untyped_storage().data_ptr() for each in saved if each.shape == x.shape and each.dtype is BF16}
    outputs_of_products = 2  # of b and c, which are multiplied
    assert len(storages) == 1 + outputs_of_products
    assert not any(each.shape == x.shape and each.dtype is torch.float32 for each in saved)
    y.sum().backward()


def test_the_norms_output_has_its_place_in_the_graph() -> None:
    """A gradient of it, and a hook on it that is registered after the linears have read it, see all readers."""
    found = []
    for patched in (False, True):
        block, x = patched_block()
        kept: list[Tensor] = []
        block.read = kept.append
        if not patched:
            unpatched(block)
        with torch.autocast("cpu", BF16):
            y = block(x)
        seen: list[Tensor] = []
        kept[0].register_hook(seen.append)
        (gradient,) = torch.autograd.grad(y.sum(), kept[0])
        found.append((gradient, seen[0]))
    for mine, theirs in zip(*found[::-1], strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        # Three terms in bf16, which stock adds up in fp32.
        assert (mine - theirs).abs().max() <= 3 * torch.finfo(BF16).eps * theirs.abs().max()


def test_readers_without_gradients_or_autocast_get_no_shared_cast() -> None:
    block, x = patched_block()
    read: list[Tensor] = []

    def without(h: Tensor) -> None:
        with torch.no_grad():
            read.append(block.a(h))
        with torch.autocast("cpu", enabled=False):
            read.append(block.b(h))

    block.read = without
    with torch.autocast("cpu", BF16):
        y = block(x)
    assert [each.dtype for each in read] == [BF16, torch.float32]
    y.sum().backward()
    unpatched(block)
    block.read = lambda h: None
    for weight in (block.a.weight, block.norm.weight):
        assert weight.grad is not None
        (expected,) = torch.autograd.grad(y_of(block, x).sum(), weight)
        assert distance([weight.grad], [expected.double()]) <= 2 * torch.finfo(BF16).eps


def y_of(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        y: Tensor = block(x)
    return y


class InFp32(nn.Linear):
    """Leaves autocast, as a router or a head of a model's own class may."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x, self.weight, self.bias)


class WithLinearsInFp32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.act = nn.Embedding(50, 16), nn.GELU()
        self.up, self.down, self.head = InFp32(16, 32), InFp32(32, 16), InFp32(16, 50, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        logits = self.head(x + self.down(self.act(self.up(x))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels"])
def test_linears_that_leave_autocast_compute_in_fp32(recipe: str) -> None:
    torch.manual_seed(0)
    model, (ids, labels) = WithLinearsInFp32(), torch.randint(0, 50, (2, 2, 12))
    stock = copy.deepcopy(model)
    memopt.patch(model, recipe, inputs={"ids": ids, "labels": labels})
    with torch.autocast("cpu", torch.bfloat16):
        before, after = stock(ids, labels), model(ids, labels)
    before["loss"].backward()
    after["loss"].backward()
    assert after["logits"].dtype is before["logits"].dtype is torch.float32
    torch.testing.assert_close(after["loss"], before["loss"])
    for one, other in ((stock.head, model.head), (stock.embed, model.embed)):
        torch.testing.assert_close(other.weight.grad, one.weight.grad)


def test_an_output_that_was_changed_in_place_is_cast_anew() -> None:
    found = []
    for patched in (True, False):
        block, x = patched_block()
        block.read = lambda h, block=block: (block.a(h), h.mul_(2))
        if not patched:
            unpatched(block)
        with torch.no_grad() if not patched else torch.enable_grad():
            found.append(y_of(block, x))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_without_an_affine_keeps_16_bits_and_returns_32(kind: Any) -> None:
    torch.manual_seed(0)
    x, spec = torch.randn(3, 16, requires_grad=True), NormSpec(kind, 1e-6)
    y = ms_norm(x, None, None, spec, torch.float32, BF16, shares=True)
    assert torch.equal(y, ms_norm(x, None, None, spec, torch.float32))
    node: Any = y.grad_fn
    assert type(node).__name__.startswith(NormFunction.__name__)
    assert node.saved_tensors[0].dtype is BF16
    assert torch.equal(node.saved_tensors[0], shared_cast(y, lambda _: BF16))


#: Name -> config class and its own settings, of tiny mixtures of experts.
EXPERTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ERNIE-4.5-MoE": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0,
            "moe_num_shared_experts": 1,
        },
    ),
    "Aria": ("AriaTextConfig", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "OLMoE": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "num_key_value_heads": 4, "head_dim": 4,
        },
    ),
}  # fmt: skip
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def mixture(name: str, seed: int) -> nn.Module:
    """Its matrices are three times those of a fresh model, so that experts differ and their choice matters."""
    torch.manual_seed(seed)
    kind, own = EXPERTS[name]
    config = getattr(transformers, kind)(**SIZES | own)
    if name == "Aria":
        from transformers.models.aria.modeling_aria import AriaTextForCausalLM

        model: nn.Module = AriaTextForCausalLM(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    for each in model.parameters():
        each.data = torch.empty_like(each).uniform_(0.5, 1.5) if each.dim() == 1 else each.data * 3
    return model.train()


def ratio_of_errors(name: str, seed: int) -> float:
    """Error of the whole gradient under autocast, ours over stock's, against stock in fp64."""
    stock = mixture(name, seed)
    ids = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(seed))
    gradients = []
    exact = copy.deepcopy(stock).double()
    exact.set_experts_implementation("eager")  # the one that there is in fp64
    for model in (exact, stock, memopt.patch(copy.deepcopy(stock))):
        with torch.autocast("cpu", BF16, enabled=bool(gradients)):
            model(input_ids=ids, labels=ids).loss.backward()
        named = {key: each.grad.double() for key, each in model.named_parameters() if each.grad is not None}
        gradients.append([named[key] for key in sorted(named)])
    truth, theirs, mine = gradients
    return distance(mine, truth) / distance(theirs, truth)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_tokens_are_routed_as_in_the_stock_model(name: str) -> None:
    """Where a token goes to another expert than in the stock model, the error is several times stock's."""
    ratios = sorted(ratio_of_errors(name, seed) for seed in range(12))
    print(f"{name}: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")
    assert ratios[-1] <= 1.25  # where `memopt verify` passes


@pytest.mark.parametrize("name", ["ERNIE-4.5-MoE", "Mixtral"])
def test_a_mixtures_output_under_autocast_is_the_stock_models(name: str) -> None:
    stock = mixture(name, 0)
    ids = torch.arange(1, 49).view(2, 24)
    with torch.autocast("cpu", BF16):
        theirs, mine = (model(input_ids=ids).logits.sum(-1) for model in (stock, memopt.patch(copy.deepcopy(stock))))
    assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()
