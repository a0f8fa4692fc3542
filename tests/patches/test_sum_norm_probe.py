"""Which modules may leave out their sum: those whose forward is norm(dense(hidden) + residual) and nothing else."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memopt.patches.registry import patches
from memopt.patches.sum_norm.probe import find
from memopt.patches.sum_norm.site import SumNormSite
from memopt.walk.models.build import clone_to_meta
from memopt.walk.observe import find_sites, walk_model
from memopt.walk.sites import NormSite, Sites
from tests.factories import tiny_model

pytestmark = pytest.mark.walks(shared=False)

NORM = NormSite("norm", "layer", 16, 1e-5, "norm.weight", "norm.bias")
SITE = SumNormSite("", "dense", "drop", "norm", ("hidden", "residual"), 1)


class PostNorm(nn.Module):
    """norm(drop(dense(hidden)) + residual) with room for one change."""

    def __init__(self):
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(24, 16), nn.Dropout(0.1), nn.LayerNorm(16)

    def forward(self, hidden, residual):
        return self.norm(self.drop(self.dense(hidden)) + residual)


def found(module: nn.Module) -> tuple[SumNormSite, ...]:
    return find(module, Sites("M", "m", norms=(NORM,)))


def changed(change) -> nn.Module:
    """A post-norm module whose forward is `change` of the parts."""

    class Changed(PostNorm):
        def forward(self, hidden, residual):
            return change(self, hidden, residual)

    return Changed()


def test_the_plain_formula_is_recognised():
    assert found(PostNorm()) == (SITE,)


def test_a_model_on_the_meta_device_is_enough():
    assert found(PostNorm().to("meta")) == (SITE,)


def test_the_order_of_the_sum_does_not_matter():
    assert found(changed(lambda m, h, r: m.norm(r + m.drop(m.dense(h))))) == (SITE,)


def test_a_sum_written_into_the_output_of_dense_is_the_same():
    assert found(changed(lambda m, h, r: m.norm(m.drop(m.dense(h)).add_(r)))) == (SITE,)


def test_a_sum_in_fp32_that_is_rounded_as_the_plain_one_is_the_same():
    assert found(changed(lambda m, h, r: m.norm((m.drop(m.dense(h)).float() + r.float()).to(h.dtype)))) == (SITE,)


def test_a_residual_that_comes_first_is_distinguished_from_one_that_comes_second():
    class Swapped(PostNorm):
        def forward(self, residual, hidden):
            return super().forward(hidden, residual)

    (site,) = found(Swapped())
    assert (site.arguments, site.residual) == (("residual", "hidden"), 0)


def test_a_dropout_is_not_needed():
    class Bare(PostNorm):
        def __init__(self):
            super().__init__()
            del self.drop

        def forward(self, hidden, residual):
            return self.norm(self.dense(hidden) + residual)

    (site,) = found(Bare())
    assert site.between is None


def keep(module, tensor):
    module.kept = tensor
    return tensor


REFUSED = {
    "the sum returned as well": lambda m, h, r: (m.norm(s := m.drop(m.dense(h)) + r), s),
    "the sum kept on the module": lambda m, h, r: m.norm(keep(m, m.drop(m.dense(h)) + r)),
    "the norm before the addition": lambda m, h, r: m.norm(m.drop(m.dense(h))) + r,
    "the norm on the input of dense": lambda m, h, r: m.drop(m.dense(m.norm(h))) + r,
    "a dropout on the sum": lambda m, h, r: m.norm(m.drop(m.dense(h) + r)),
    "a dropout on the residual": lambda m, h, r: m.norm(m.dense(h) + m.drop(r)),
    "a dropout as a function in train mode": lambda m, h, r: m.norm(F.dropout(m.drop(m.dense(h)), 0.1, m.training) + r),
    "a dropout left out in train mode": lambda m, h, r: m.norm((m.dense(h) if m.training else m.drop(m.dense(h))) + r),
    "a scaled residual": lambda m, h, r: m.norm(m.drop(m.dense(h)) + 1.001 * r),
    "a scaled branch": lambda m, h, r: m.norm(0.5 * m.drop(m.dense(h)) + r),
    "a scaled sum, which a norm hides": lambda m, h, r: m.norm(2 * (m.drop(m.dense(h)) + r)),
    "a difference": lambda m, h, r: m.norm(m.drop(m.dense(h)) - r),
    "an activation": lambda m, h, r: m.norm(F.gelu(m.drop(m.dense(h))) + r),
    "no residual": lambda m, h, r: m.norm(m.drop(m.dense(h))),
    "a residual without its gradient": lambda m, h, r: m.norm(m.drop(m.dense(h)) + r.detach()),
    "dense without its gradient": lambda m, h, r: m.norm(m.drop(m.dense(h.detach())) + r),
    "dense on the residual": lambda m, h, r: m.norm(m.drop(m.dense(h)) + m.dense(r)),
    "the norm twice": lambda m, h, r: m.norm(m.norm(m.drop(m.dense(h)) + r)),
    "a sum written into the residual": lambda m, h, r: m.norm(r.add_(m.drop(m.dense(h)))),
    "a norm that is read and not called": lambda m, h, r: F.layer_norm(
        m.drop(m.dense(h)) + r, (r.size(-1),), m.norm.weight, m.norm.bias
    ),
    "a sum of more than two terms in fp32": lambda m, h, r: m.norm(m.drop(m.dense(h)).float() + 0.5 * r + 0.5 * r),
    "a branch rounded to bf16": lambda m, h, r: m.norm(m.drop(m.dense(h)).bfloat16().to(h.dtype) + r),
    "a sum in fp32": lambda m, h, r: m.norm(m.drop(m.dense(h)).float() + r.float()).to(h.dtype),
    "a flipped sum": lambda m, h, r: m.norm((m.drop(m.dense(h)) + r).flip(1)).flip(1).flip(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_that_does_anything_else_is_refused(name):
    assert found(changed(REFUSED[name])) == ()


class Keyworded(PostNorm):
    def forward(self, hidden, *, residual):
        return super().forward(hidden, residual)


class Masked(PostNorm):
    def forward(self, hidden, residual, mask=None):
        return super().forward(hidden, residual)


class Packed(PostNorm):
    def forward(self, *tensors):
        return super().forward(*tensors)


class PreNorm(PostNorm):
    def forward(self, hidden):
        return hidden + self.drop(self.dense(self.norm(hidden)))


class Misnamed(PostNorm):
    """Its signature is that of another function, whose arguments have another order."""

    @functools.wraps(PostNorm.forward)
    def forward(self, residual, hidden):
        return super().forward(hidden, residual)


@pytest.mark.parametrize("module", [Keyworded, Masked, Packed, PreNorm, Misnamed])
def test_a_forward_with_other_arguments_is_refused(module):
    assert found(module()) == ()


@pytest.mark.parametrize("what", ["parameter", "buffer", "linear", "dropout", "dropout with a buffer"])
def test_a_module_with_anything_beside_these_is_refused(what):
    module = PostNorm()
    if what == "parameter":
        module.scale = nn.Parameter(torch.ones(1))
    elif what == "buffer":
        module.register_buffer("scale", torch.ones(1))
    elif what == "linear":
        module.other = nn.Linear(2, 2)
    elif what == "dropout":
        module.other = nn.Dropout(0.1)
    else:
        module.drop.register_buffer("scale", torch.ones(1))
    assert found(module) == ()


def test_the_module_itself_is_not_run_and_not_changed():
    module = PostNorm().train()
    before, calls = dict(vars(module)), []
    for part in (module, module.dense, module.norm):
        part.register_forward_hook(lambda *_: calls.append(1))
    found(module)
    assert not calls
    assert vars(module) == before


class Encoder(nn.Module):
    """The residual is read elsewhere too, and so is the norm's output."""

    def __init__(self):
        super().__init__()
        self.first, self.post = nn.Linear(16, 24), PostNorm()

    def forward(self, x):
        y = self.post(F.relu(self.first(x)), x)
        return y + x


@pytest.mark.parametrize("prepare", [lambda model: model, clone_to_meta], ids=["numbers", "meta"])
def test_the_walk_proposes_what_it_finds_around_a_norm(prepare):
    model = prepare(Encoder())
    x = torch.randn(2, 5, 16, device=next(model.parameters()).device)
    assert patches()  # the probes are known to the walk
    (site,) = find_sites(model, {"x": x}).of(SumNormSite)
    assert (site.name, site.dense, site.between, site.norm) == ("post", "dense", "drop", "norm")


@pytest.mark.parametrize(("name", "a_layer"), [("bert", 2), ("roberta", 2), ("vit", 0), ("t5", 0), ("llama", 0)])
def test_post_norm_encoders_have_two_in_every_layer_and_pre_norm_models_none(name, a_layer):
    model = tiny_model(name)
    assert len(walk_model(model).of(SumNormSite)) == a_layer * model.config.num_hidden_layers
