"""Under torch.compile a patched model saves no more for backward than in eager mode, and stays the same model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import memopt
from benchmarks.compiled import BACKEND, CASES, measure, saved_bytes
from memopt.patches import compiled
from memopt.prediction.planner.levels import levels_of
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from tests.factories import tiny_config, tiny_inputs, tiny_model

WIDTH, ROWS = 32, 6
ADD = torch.ops.aten.add.Tensor


class Block(nn.Module):
    """A block without attention."""

    def __init__(self, *, is_post_norm: bool) -> None:
        super().__init__()
        self.is_post_norm = is_post_norm
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_post_norm:
            return self.norm(x + self.down(self.act(self.up(x))))
        return x + self.down(self.act(self.up(self.norm(x))))


class Toy(nn.Module):
    def __init__(self, layers: int = 2, *, checkpointed: bool = False, is_post_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(is_post_norm=is_post_norm) for _ in range(layers))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def toy(*, patched: bool = True, recipe: str = "exact-unfolded", **options: Any) -> Toy:
    torch.manual_seed(0)
    model = Toy(**options).train()
    return memopt.patch(model, recipe, inputs={"x": draw()}) if patched else model


def draw(rows: int = ROWS) -> Tensor:
    return torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(1))


def compiled_model(model: nn.Module, **options: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = torch.compile(model, backend=BACKEND, fullgraph=True, **options)
    return run


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def is_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# -- bytes and gradients --------------------------------------------------------------------------------------------


def test_a_compiled_model_saves_what_eager_memopt_saves() -> None:
    model, x = toy(), draw()
    eager = saved_bytes(lambda: model(x), model)
    run = compiled_model(model)
    assert saved_bytes(lambda: run(x), model) <= eager
    stock = compiled_model(toy(patched=False))
    assert saved_bytes(lambda: stock(x), model) > 1.4 * eager


def test_a_compiled_model_has_the_gradients_of_the_stock_model() -> None:
    inputs = tiny_inputs("llama")
    stock, patched = tiny_model("llama").train(), memopt.patch(tiny_model("llama").train())
    compiled._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"under torch.compile the logits are whole; .* compile the blocks"):
        loss = compiled_model(patched)(**inputs).loss
    expected = stock(**inputs).loss
    assert torch.allclose(loss, expected, rtol=1e-6)
    is_close(gradients(patched, loss), gradients(stock, expected))


def test_blocks_compiled_on_their_own_leave_the_loss_in_parts() -> None:
    inputs = tiny_inputs("llama")
    stock, patched = tiny_model("llama").train(), memopt.patch(tiny_model("llama").train())
    for block in patched.model.layers:
        block.compile(backend=BACKEND, fullgraph=True)
    output, expected = patched(**inputs), stock(**inputs)
    assert type(output.logits).__name__ == "LazyLogits"
    is_close(gradients(patched, output.loss), gradients(stock, expected.loss))


def test_outputs_of_linears_are_recomputed_in_compiled_code_too() -> None:
    inputs = {**tiny_inputs("llama"), "use_cache": False}
    kept = {}
    for recompute in ("none", "auto"):
        torch.compiler.reset()
        recipe = memopt.load_recipe("exact-unfolded", [f"linears.recompute={recompute}", "loss.method=none"])
        stock, patched = (tiny_model("llama", num_hidden_layers=1).train() for _ in range(2))
        run = compiled_model(memopt.patch(patched, recipe))
        kept[recompute] = saved_bytes(lambda run=run: run(**inputs).loss, patched)  # type: ignore[misc]
    assert kept["none"] - kept["auto"] >= inputs["input_ids"].numel() * 4 * 2 * 172, "gate and up"
    is_close(gradients(patched, run(**inputs).loss), gradients(stock, stock(**inputs).loss))


def test_a_checkpointed_block_inside_a_compiled_model_is_right_and_saves_no_more_than_stocks() -> None:
    x = draw()
    stock, patched = toy(patched=False, checkpointed=True), toy(checkpointed=True)
    run = compiled_model(patched)
    is_close(gradients(patched, run(x).square().sum()), gradients(stock, stock(x).square().sum()))
    theirs = compiled_model(stock)
    assert saved_bytes(lambda: run(x), patched) <= saved_bytes(lambda: theirs(x), stock)


def test_other_lengths_compile_as_often_as_in_the_stock_model() -> None:
    def graphs(model: nn.Module) -> int:
        torch.compiler.reset()
        count = 0

        def backend(module: Any, inputs: Any) -> Any:
            nonlocal count
            count += 1
            return torch._dynamo.lookup_backend(BACKEND)(module, inputs)

        run = torch.compile(model, backend=backend, fullgraph=True)
        for rows in (ROWS, 7, 9, 11):
            run(draw(rows)).sum().backward()
        return count

    assert graphs(toy()) == graphs(toy(patched=False)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_block_keeps_at_most_its_limit(case: Any) -> None:
    assert measure(case).passed


# -- which sums are saved -------------------------------------------------------------------------------------------


def sums_of(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> int:
    graph = make_fx(function)(*(torch.randn(shape) for shape in shapes)).graph
    return sum(1 for _ in compiled.sums(graph))


def test_each_sum_of_a_residual_stream_is_saved() -> None:
    def stream(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(x).to(torch.float64).float() @ w
        return x

    assert sums_of(stream, (4, 8), (8, 8)) == 3


def test_sums_inside_elementwise_functions_and_of_small_tensors_may_be_recomputed() -> None:
    assert sums_of(lambda x: F.gelu(x.pow(3) * 0.04 + x) + x, (4, 8)) == 0
    assert sums_of(lambda x, bias: x @ x + bias, (8, 8), (8,)) == 0
    assert sums_of(lambda x, cos, sin: x * cos + torch.cat((-x, x)).chunk(2)[0] * sin, (4, 8), (1, 8), (1, 8)) <= 1


def test_backward_does_not_recompute_the_residual_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def recomputed() -> set[str]:
        """Sums of the stream that both the forward and the backward graph compute."""
        torch.compiler.reset()
        graphs: list[Graph] = []

        def keep(module: GraphModule, inputs: Any) -> Any:
            graphs.append(module.graph)
            return make_boxed_func(module.forward)

        backend = aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            decompositions=select_decomp_table,
            partition_fn=min_cut_rematerialization_partition,
        )
        torch.compile(toy(layers=3, is_post_norm=True), backend=backend, fullgraph=True)(draw()).sum().backward()
        forward, backward = ({node.name for node in graph.nodes if is_of_stream(node)} for graph in graphs)
        return forward & backward

    def is_of_stream(node: Node) -> bool:
        terms = node.all_input_nodes
        return node.target is ADD and [tuple(term.meta["val"].shape) for term in terms] == 2 * [(2, ROWS, WIDTH)]

    assert recomputed() == set()
    monkeypatch.setattr(compiled, "keep_sums", lambda graph: None)
    assert recomputed() != set()


# -- settings -------------------------------------------------------------------------------------------------------


def test_other_models_and_the_settings_of_the_user_stay_as_they_are() -> None:
    from torch._functorch import config

    before = config.get_config_copy()
    stock = toy(patched=False)
    run = compiled_model(stock)
    expected = saved_bytes(lambda: run(draw()), stock)
    torch.compiler.reset()
    compiled_model(toy())(draw())
    assert config.get_config_copy() == before
    run = compiled_model(stock)
    assert saved_bytes(lambda: run(draw()), stock) == expected


def test_a_budget_of_the_user_decides_alone() -> None:
    from torch._functorch import config

    kept = {}
    for patched in (False, True):
        torch.compiler.reset()
        model = toy(patched=patched)
        with config.patch(activation_memory_budget=0.3):
            run = compiled_model(model)
            kept[patched] = saved_bytes(lambda run=run: run(draw()), model)  # type: ignore[misc]
    assert kept[True] == kept[False]


def test_a_pass_of_the_user_runs_too() -> None:
    from torch._functorch import config

    seen = []
    with config.patch(joint_custom_pass=lambda module, inputs: seen.append(module) or module):
        model = toy()
        run = compiled_model(model)
        assert saved_bytes(lambda: run(draw()), model) <= saved_bytes(lambda: model(draw()), model)
    assert len(seen) == 1


# -- recipes that are off -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int8", "approx-2bit"])
def test_what_is_off_in_compiled_code_is_said_once(recipe: str) -> None:
    compiled._warn_once.cache_clear()
    model = toy(recipe=recipe)
    if recipe == "approx-2bit":
        model.requires_grad_(False).first.requires_grad_(True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = compiled_model(model)
        run(draw())
        run(draw(9))
    assert len([entry for entry in said if "under torch.compile" in str(entry.message)]) == 1


def test_a_summary_says_what_compiled_code_saves() -> None:
    said = str(memopt.summary(toy(recipe="int8")))
    assert "under torch.compile these are off as far as they are not exact: compression" in said
    assert "torch.compile" not in str(memopt.summary(toy()))


def test_an_exact_recipe_says_nothing() -> None:
    compiled._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python", RuntimeWarning)  # of Python 3.13.0
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # by PyTorch's first compilation
        compiled_model(toy())(draw())


@pytest.mark.rotates(3)
def test_a_plan_of_mixed_levels_holds_in_compiled_code_but_for_offloading() -> None:
    compiled._warn_once.cache_clear()
    config = tiny_config("llama", num_hidden_layers=3, architectures=["LlamaForCausalLM"])
    levels = levels_of(find_sites(build_meta(config)), memopt.load_recipe("exact-unfolded"))
    numbers = {level.words: number for number, level in enumerate(levels.beyond, 1)}
    ids = tiny_inputs("llama")["input_ids"]

    def patched(checkpointed: str) -> nn.Module:
        model = tiny_model("llama", num_hidden_layers=3, use_cache=False).train()
        return memopt.patch(model, levels.recipe_at((numbers[checkpointed], numbers["up_proj recomputed"], 0, 0)))

    eager, model = patched("checkpointed"), patched("checkpointed with offloaded input")
    run = compiled_model(model)
    words = r"checkpointing\.offload is off: inputs of checkpointed blocks stay on the device"
    with pytest.warns(UserWarning, match=words):
        run(ids)
    in_eager = saved_bytes(lambda: eager(ids).logits, eager)
    # A compiled region that runs again saves the state of the random numbers.
    assert saved_bytes(lambda: run(ids).logits, model) <= in_eager + torch.get_rng_state().nbytes
