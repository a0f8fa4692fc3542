"""Folds are taken back: what was not trained is the original's bit by bit, what was trained computes the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import memopt
from memopt.checkpoint.fold import Fold, FoldedConsumer
from memopt.checkpoint.manifest import read_manifest
from memopt.checkpoint.sources.source import open_source
from memopt.checkpoint.unfold import Unfolded
from memopt.checkpoint.unpatch import write_unpatched
from memopt.checkpoint.writer import write_checkpoint
from memopt.walk.sites import Consumer, NormSite
from tests.checkpoint.builders import HIDDEN, plan_of, rms_norm, rms_plan, rms_tensors, write_checkpoint_files

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]
REPEATED = tuple(range(0, HIDDEN, 2)) + (-1,) * 3 + tuple(range(1, HIDDEN, 2))


def tensors_of(dtype: torch.dtype) -> Tensors:
    """Two norms with biases, and readers in every layout; `p` reads both norms, each over its own coordinates."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"n.weight": (HIDDEN,), "n.bias": (HIDDEN,), "m.weight": (HIDDEN,), "m.bias": (HIDDEN,),
              "c.weight": (HIDDEN, 40), "c.bias": (40,), "e.weight": (3, 8, HIDDEN), "e.bias": (3, 8),
              "k.weight": (5, HIDDEN, 3, 3), "k.bias": (5,), "r.weight": (7, HIDDEN + 3), "r.bias": (7,),
              "p.weight": (9, 2 * HIDDEN), "p.bias": (9,), "other": (4, 4)}  # fmt: skip
    return {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def norms(offset: int) -> list[NormSite]:
    axes = {"c": 0, "e": 2, "k": 1}
    readers = [Consumer(f"{n}.weight", n, axis=a, bias=f"{n}.bias", scale=0.3) for n, a in axes.items()]
    readers.append(Consumer("r.weight", "r", axis=1, bias="r.bias", channels=REPEATED))
    none, own = (-1,) * HIDDEN, tuple(range(HIDDEN))
    first = Consumer("p.weight", "p", axis=1, bias="p.bias", channels=own + none)
    second = dataclasses.replace(first, channels=none + own)
    return [
        rms_norm(0, kind="layer", weight="n.weight", bias="n.bias", offset=offset, consumers=(*readers, first)),
        rms_norm(1, kind="layer", weight="m.weight", bias="m.bias", offset=offset, consumers=(second,)),
    ]


@dataclasses.dataclass
class Case:
    original: Path
    patched: Path
    folds: tuple[Fold, ...]

    def train(self, edit: Callable[[Tensors], object]) -> None:
        """Change the weights of the patched folder."""
        tensors = load_file(self.patched / FILE)
        edit(tensors)
        save_file(tensors, self.patched / FILE, metadata={"format": "pt"})

    def unpatch(self) -> tuple[Tensors, Unfolded]:
        out = self.patched.with_name("out")
        done = write_unpatched(open_source(str(self.patched)), open_source(str(self.original)), self.folds, out)
        return load_file(out / FILE), done


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., Case]:
    def make(dtype: torch.dtype, offset: int = 0, edit: Callable[[Tensors], object] = lambda tensors: None) -> Case:
        tensors = tensors_of(dtype)
        edit(tensors)
        original = write_checkpoint_files(tmp_path / "original", tensors)
        written = write_checkpoint(open_source(str(original)), plan_of(norms(offset)), tmp_path / "patched")
        folds = tuple(record.fold for record in read_manifest(written.out).folds)
        assert len(folds) == 2
        return Case(original, written.out, folds)

    return make


def outputs(tensors: Tensors, folds: tuple[Fold, ...]) -> Tensors:
    """What each reader makes of one random x_hat for each norm, in fp64."""
    generator = torch.Generator().manual_seed(6)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    result: Tensors = {}
    for fold in folds:
        x_hat = torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
        y = (exact[fold.weight] + fold.offset) * x_hat + exact[str(fold.bias)]
        for reader in fold.consumers:
            name = reader.weight
            product = _contract(exact[name], y, reader)
            bias = exact[str(reader.bias)]
            result[name] = result.get(name, bias) + product.reshape(*bias.shape, -1).sum(-1)
    return result


def _contract(weight: torch.Tensor, y: torch.Tensor, reader: FoldedConsumer) -> torch.Tensor:
    if reader.channels is not None:
        index = torch.tensor(reader.channels)
        y = torch.where(index >= 0, y[index.clamp(min=0)], 0.0)
    return torch.tensordot(weight, y * reader.scale, dims=([reader.axis], [0]))


def shake(tensors: Tensors) -> None:
    """What training does: every tensor is another one by 10 %."""
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors.values():
        tensor += (0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)


def assert_same_function(
    before: Tensors, after: Tensors, folds: tuple[Fold, ...], dtype: torch.dtype | None = None
) -> None:
    """Every element is off by a rounding to `dtype`, half an epsilon of its own size, and what it meets by another."""
    eps = torch.finfo(dtype or after["c.weight"].dtype).eps
    for name, expected in outputs(before, folds).items():
        size = sum(_sizes(tensors, folds, name) for tensors in (before, after))
        assert ((outputs(after, folds)[name] - expected).abs() <= eps * size).all(), name


def _sizes(tensors: Tensors, folds: tuple[Fold, ...], name: str) -> torch.Tensor:
    """The sums of `outputs` over absolute values: what a rounding of each element is relative to."""
    absolute = {key: value.abs() for key, value in tensors.items()}
    generator = torch.Generator().manual_seed(6)
    total = None
    for fold in folds:
        x_hat = torch.randn(HIDDEN, generator=generator, dtype=torch.float64).abs()
        scale = (tensors[fold.weight].double() + fold.offset).abs()
        y = scale * x_hat + absolute[str(fold.bias)].double()
        for reader in fold.consumers:
            if reader.weight == name:
                bias = absolute[str(reader.bias)].double()
                product = _contract(absolute[name].double(), y, dataclasses.replace(reader, scale=abs(reader.scale)))
                total = (bias if total is None else total) + product.reshape(*bias.shape, -1).sum(-1)
    assert total is not None
    return total


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_was_not_trained_is_the_original_bit_by_bit(
    case: Callable[..., Case], dtype: torch.dtype, offset: int
) -> None:
    def near_zero(tensors: Tensors) -> None:
        tensors["n.weight"][3] = -offset  # a scale of zero
        tensors["m.weight"][4] = 1e-30 if dtype != torch.float16 else 0  # below the epsilon of a scale of one

    untrained = case(dtype, offset, near_zero)
    _, done = untrained.unpatch()
    assert (untrained.patched.with_name("out") / FILE).read_bytes() == (untrained.original / FILE).read_bytes()
    assert (len(done.norms), done.computed, done.kept) == (2, [], [])
    assert len(done.original) == len(tensors_of(dtype)) - 1


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_was_trained_computes_the_same(case: Callable[..., Case], dtype: torch.dtype, offset: int) -> None:
    trained = case(dtype, offset)
    trained.train(shake)
    before = load_file(trained.patched / FILE)
    after, done = trained.unpatch()
    assert (len(done.norms), done.kept) == (2, [])
    assert_same_function(before, after, trained.folds)
    # A trained affine is on top of the original one: s_r = s_o s.
    original = load_file(trained.original / FILE)["n.weight"].double() + offset
    expected = original * (before["n.weight"].double() + offset) - offset
    assert torch.allclose(after["n.weight"].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_elements_that_training_left_alone_are_the_originals(case: Callable[..., Case]) -> None:
    trained = case(torch.bfloat16)
    trained.train(lambda tensors: tensors["c.weight"][:, 5].mul_(1.5))
    after, done = trained.unpatch()
    original = load_file(trained.original / FILE)
    assert done.computed == ["c.weight", "c.bias"]
    untouched = [column for column in range(40) if column != 5]
    assert torch.equal(after["c.weight"][:, untouched], original["c.weight"][:, untouched])
    assert torch.equal(after["n.weight"], original["n.weight"])


def test_a_trained_channel_whose_scale_is_near_zero_keeps_its_fold_and_is_named(case: Callable[..., Case]) -> None:
    trained = case(torch.float32, edit=lambda tensors: tensors["n.weight"][2:4].zero_())
    trained.train(lambda tensors: tensors["e.weight"][0, 0, 3].fill_(0.5))
    before = load_file(trained.patched / FILE)
    after, done = trained.unpatch()
    ((norm, why),) = done.kept
    assert norm == "model.layers.0.norm"
    assert "channel 3 of 24" in why
    assert "e.weight" in why
    assert after["n.weight"][2:4].tolist() == [0.0, 1.0]  # the untrained channel is the original's
    assert after["e.weight"][0, 0, 3] == 0.5
    assert_same_function(before, after, trained.folds)


def test_a_quotient_that_would_overflow_keeps_its_fold(case: Callable[..., Case]) -> None:
    trained = case(torch.float16, edit=lambda tensors: tensors["n.weight"].fill_(0.002))
    trained.train(lambda tensors: tensors["e.weight"][0, 0, 3].fill_(1000.0))
    before = load_file(trained.patched / FILE)
    after, done = trained.unpatch()
    assert [norm for norm, _ in done.kept] == ["model.layers.0.norm"]
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert_same_function(before, after, trained.folds)


@pytest.mark.parametrize(("stored", "saved"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_folder_saved_in_another_dtype(case: Callable[..., Case], stored: torch.dtype, saved: torch.dtype) -> None:
    trained = case(stored)

    def edit(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(saved) for name, tensor in tensors.items()})
        tensors["c.weight"][0] += 0.25

    trained.train(edit)
    before = load_file(trained.patched / FILE)
    after, done = trained.unpatch()
    original = load_file(trained.original / FILE)
    assert torch.equal(after["e.weight"], original["e.weight"].to(saved))
    assert done.computed == ["c.weight", "c.bias"]
    assert_same_function(before, after, trained.folds, torch.bfloat16)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop("e.weight"), "e.weight is not in the folder"),
        (lambda tensors: tensors.update({"e.weight": torch.ones(4, 8, HIDDEN)}), "e.weight has another shape"),
        (lambda tensors: tensors.update({"e.weight": tensors["e.weight"].char()}), "e.weight is stored as I8"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_a_norm_whose_readers_are_others_keeps_its_fold(
    case: Callable[..., Case], edit: Callable[[Tensors], object], words: str
) -> None:
    """As with another head: who reads the norm now is not known."""
    trained = case(torch.float32)
    trained.train(edit)
    after, done = trained.unpatch()
    assert done.norms == ["model.layers.1.norm"]
    assert [(norm, words in why) for norm, why in done.kept] == [("model.layers.0.norm", True)]
    assert bool((after["n.weight"] == 1).all())
    patched = load_file(trained.patched / FILE)
    assert torch.equal(after["c.weight"], patched["c.weight"])
    assert torch.equal(after["p.weight"][:, :HIDDEN], patched["p.weight"][:, :HIDDEN])


def test_an_original_in_pickle_files_is_read_as_when_it_was_patched(tmp_path: Path) -> None:
    model = write_checkpoint_files(tmp_path / "model", rms_tensors())
    (model / FILE).unlink()
    torch.save(rms_tensors(), model / "pytorch_model.bin")
    write_checkpoint(open_source(str(model), allow_pickle=True), rms_plan(), tmp_path / "patched")
    memopt.unpatch_checkpoint(tmp_path / "patched", out=tmp_path / "out")
    after = load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(after[name], tensor) for name, tensor in rms_tensors().items())


def test_shards_side_files_and_private_modes_stay(tmp_path: Path) -> None:
    model = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=3)
    patched = write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "patched").out
    (patched / "LICENSE").chmod(0o600)
    memopt.unpatch_checkpoint(patched, out=tmp_path / "out")
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (model, tmp_path / "out")]
    assert contents[0] == contents[1]
    assert (tmp_path / "out" / "LICENSE").stat().st_mode & 0o777 == 0o600
