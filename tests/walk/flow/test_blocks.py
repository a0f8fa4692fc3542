"""Blocks are found by the shape of the module tree."""

from __future__ import annotations

from torch import Tensor, nn

from memopt.walk.observe import find_blocks


class Called(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Group(Called, nn.ModuleDict):
    """A container that has a forward."""


class Layer(Called):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)


class OtherLayer(Layer):
    pass


class PlainLayer(Called):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


def blocks(model: nn.Module, visited: tuple[str, ...] = ()) -> tuple[str, ...]:
    modules = dict(model.named_modules())
    norms = {name for name, module in modules.items() if isinstance(module, nn.LayerNorm)}
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    return find_blocks(model, norms, linears, visited or tuple(modules))


def test_children_of_a_uniform_list_are_blocks() -> None:
    assert blocks(nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})) == ("layers.0", "layers.1")


def test_sublayers_of_different_types_are_part_of_their_block() -> None:
    model = nn.ModuleDict(
        {"block": nn.ModuleList(Group({"layer": nn.ModuleList([Layer(), OtherLayer()])}) for _ in range(2))}
    )
    assert blocks(model) == ("block.0", "block.1")


def test_layers_inside_stages_are_the_blocks() -> None:
    stages = nn.ModuleList(nn.ModuleDict({"blocks": nn.ModuleList([Layer(), Layer()])}) for _ in range(2))
    assert blocks(nn.ModuleDict({"stages": stages})) == tuple(f"stages.{i}.blocks.{j}" for i in "01" for j in "01")


def test_a_list_of_several_layer_types_counts_where_no_uniform_one_does() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), OtherLayer(), Layer()])})
    assert blocks(model) == ("layers.0", "layers.1", "layers.2")


def test_experts_without_norms_are_no_blocks() -> None:
    layers = nn.ModuleList(Group({"attention": Layer(), "experts": nn.ModuleList([PlainLayer()] * 2)}) for _ in "ab")
    assert blocks(nn.ModuleDict({"layers": layers})) == ("layers.0", "layers.1")


def test_without_norms_two_linears_make_a_block() -> None:
    assert blocks(nn.ModuleDict({"layers": nn.ModuleList([PlainLayer(), PlainLayer()])})) == ("layers.0", "layers.1")


def test_blocks_come_in_order_of_execution_and_idle_ones_last() -> None:
    model = nn.ModuleDict({"b": nn.ModuleList([Layer()]), "a": nn.ModuleList([Layer(), Layer()])})
    assert blocks(model, ("a.0", "b.0")) == ("a.0", "b.0", "a.1")


def test_the_called_parts_of_a_container_are_blocks_in_its_place() -> None:
    """`for norm, attention, mlp in self.layers`: the list of three never runs, nor does the list inside it."""
    layers = [nn.ModuleList([nn.LayerNorm(4), Layer(), nn.ModuleList([PlainLayer(), nn.GELU()])]) for _ in "ab"]
    assert blocks(nn.ModuleDict({"layers": nn.ModuleList(layers)})) == (
        "layers.0.1",
        "layers.0.2.0",
        "layers.1.1",
        "layers.1.2.0",
    )
