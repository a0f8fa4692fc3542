"""The twin: a small fp64 model whose every parameter carries signal."""

from __future__ import annotations

import pytest
import torch

from memopt.walk.calls.twin import build_twin
from memopt.walk.models.build import build_meta
from tests.walk.configs import FAMILIES, make_config, twin


class TestBuildTwin:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_names_are_those_of_the_real_model(self, family: str) -> None:
        real = build_meta(make_config(family))
        assert {name for name, _ in twin(family).named_modules()} <= {name for name, _ in real.named_modules()}
        assert {name for name, _ in twin(family).named_parameters()} <= {name for name, _ in real.named_parameters()}

    def test_the_same_seed_gives_the_same_twin(self) -> None:
        one, other = build_twin(make_config("llama"), seed=3), build_twin(make_config("llama"), seed=3)
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    def test_another_seed_gives_another_twin(self) -> None:
        one, other = build_twin(make_config("llama"), seed=3), build_twin(make_config("llama"), seed=4)
        assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    def test_leaves_the_global_generator_alone(self) -> None:
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        build_twin(make_config("bert"))
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_is_fp64_in_eval_mode_on_cpu(self) -> None:
        model = build_twin(make_config("gpt2"))
        assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float64, "cpu")}
        assert not model.training

    @pytest.mark.parametrize("family", ["llama", "gemma", "bert", "vit", "bloom"])
    def test_every_parameter_carries_signal(self, family: str) -> None:
        for name, parameter in twin(family).named_parameters():
            assert parameter.std() > 0.03 or parameter.numel() < 8, name

    def test_norm_weights_have_both_signs_and_none_near_zero(self) -> None:
        weight = twin("llama").model.norm.weight
        assert weight.min() < -0.4 < 0.4 < weight.max()
        assert weight.abs().min() > 0.4

    def test_offset_norm_weights_keep_their_scale_away_from_zero(self) -> None:
        weight = twin("gemma").model.norm.weight
        assert (1 + weight).abs().min() > 0.4
        assert weight.std() > 0.1

    def test_rotary_tables_are_not_randomised(self) -> None:
        size = twin("llama").config.head_dim
        expected = 1e4 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        torch.testing.assert_close(twin("llama").model.rotary_emb.inv_freq.double(), expected, rtol=1e-6, atol=0)

    def test_ties_stay_tied(self) -> None:
        assert twin("gpt2").lm_head.weight is twin("gpt2").transformer.wte.weight

    def test_dropout_stays_as_configured(self) -> None:
        assert build_twin(make_config("bert", hidden_dropout_prob=0.25)).bert.embeddings.dropout.p == 0.25
