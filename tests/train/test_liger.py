"""Liger beside memopt: its kernels patch the model in `train`, after `memopt.TrainerCallback`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.models.llama import modeling_llama

import memopt
from memopt.errors import ModelError
from memopt.integrations.trainer import TrainerCallback
from tests.factories import tiny_inputs, tiny_model


@pytest.fixture(autouse=True)
def classes_kept() -> Iterator[None]:
    """Liger also replaces classes and functions of transformers for models that are built later."""
    before = dict(vars(modeling_llama))
    yield
    vars(modeling_llama).update(before)


def patched_then_liger(folder: Path, **config: bool) -> Any:
    """A model after what `Trainer.train` does before its first step; Liger's kernels run on a GPU alone."""
    model = tiny_model("llama")
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], use_liger_kernel=True, liger_kernel_config=config or None
    )
    callback = TrainerCallback()
    state: Any = type("State", (), {"is_local_process_zero": True})
    callback.on_init_end(arguments, state, None, model=model)
    apply_liger_kernel(model, arguments.liger_kernel_config)
    callback.on_train_begin(arguments, state, None, model=model)
    return model


def test_norms_and_mlps_stay_memopts_and_the_loss_is_left_to_liger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = memopt.patch(tiny_model("llama"))
    with caplog.at_level(logging.WARNING, "memopt"):
        model = patched_then_liger(tmp_path)
    assert memopt.summary(model).modules == memopt.summary(own).modules
    assert "now one of liger_kernel.transformers.model.llama" in caplog.text
    assert modeling_llama.apply_rotary_pos_emb.__module__.startswith("liger_kernel")


def test_what_was_asked_for_by_name_is_liger_and_does_not_count_as_patched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = memopt.patch(tiny_model("llama"))
    with caplog.at_level(logging.WARNING, "memopt"):
        model = patched_then_liger(tmp_path, rms_norm=True)
    norms = [name for name, _ in model.named_modules() if name.endswith("norm")]
    assert memopt.summary(model).modules == memopt.summary(own).modules - len(norms)
    assert f"{len(norms)} modules were patched, and later got a forward of liger_kernel" in caplog.text


def test_a_model_that_liger_patched_first_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """... as the one of `model_init` is. Liger's kernels do not run on meta tensors."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], use_liger_kernel=True)
    with pytest.raises(ModelError, match=r"model_init=callback\.model_init"):
        TrainerCallback().on_train_begin(arguments, None, None, model=tiny_model("llama"))


def test_without_its_kernels_the_model_computes_what_the_patched_one_does(tmp_path: Path) -> None:
    model = patched_then_liger(tmp_path, rope=False, fused_linear_cross_entropy=False)
    inputs = tiny_inputs("llama")
    assert model(**inputs).loss.item() == memopt.patch(tiny_model("llama"))(**inputs).loss.item()
