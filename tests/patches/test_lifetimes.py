"""How long tensors live inside the backward of a block: its transient follows what it saves."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memopt
from memopt.kernels.base import pieces
from memopt.torch_compat import FakeTensorMode
from memopt.trace.emulate import CudaChoices
from memopt.trace.events import Activations
from memopt.trace.fake import make_fake
from memopt.trace.timeline import record
from memopt.trace.trace import activations
from tests.factories import tiny_inputs, tiny_model

BATCH, LENGTH = 4, 64


def bodies(name: str, recipe: str = "exact-unfolded", *, checkpointed: bool) -> tuple[nn.Module, nn.Module]:
    """A stock model of three blocks in bf16 and the same patched; both checkpointed, or none."""
    # MLPs of four times the hidden size, as models have them.
    sizes = {"n_layer": 3} if name == "gpt2" else {"num_hidden_layers": 3, "intermediate_size": 256}
    stock = tiny_model(name, torch.bfloat16, **sizes).base_model
    patched = memopt.patch(copy.deepcopy(stock), recipe)
    for model in (stock, patched):
        model.config.use_cache = False
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return stock, patched


def measured(model: nn.Module, *, first: bool = False) -> Activations:
    """A step, the `first` one or the second."""
    generator = torch.Generator().manual_seed(0)
    if "pixel" in model.main_input_name:
        inputs = {"pixel_values": torch.randn(16, 3, 32, 32, generator=generator).bfloat16()}
    else:
        inputs = {"input_ids": torch.randint(3, 60, (BATCH, LENGTH), generator=generator)}

    def run() -> SimpleNamespace:
        return SimpleNamespace(loss=model(**inputs).last_hidden_state.square().mean())

    if not first:
        run().loss.backward()  # scopes find out whether they are needed
        model.zero_grad()
    return activations(record(model, run))


@pytest.mark.parametrize("name", ["llama", "vit", "gpt2", "bert"])
@pytest.mark.rotates(2)
def test_a_checkpointed_block_needs_no_more_than_checkpointing_alone(monkeypatch, name):
    monkeypatch.setattr(pieces, "LEAST", 2**8)  # as it is with large tensors
    stock, patched = bodies(name, checkpointed=True)
    assert measured(patched).peak.nbytes <= measured(stock).peak.nbytes


def test_gradients_of_gate_and_up_take_no_memory_of_their_own_under_checkpointing() -> None:
    transients = []
    for model in bodies("llama", checkpointed=True):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        make_fake(model, mode)
        with mode, CudaChoices():
            found = measured(model, first=True)
        transients.append(found.peak.nbytes - found.kept)
    stock, ours = transients
    gate = BATCH * LENGTH * 256 * 2
    # Stock holds gate, silu(gate), up and three gradients of their size; the kernel needs gate, up and one gradient.
    assert ours <= stock - 3 * gate


def test_the_first_block_of_a_backward_holds_one_gradient_of_gate_and_up_beside_each_other(monkeypatch) -> None:
    peaks = []
    for is_largest in (None, lambda tensor: False):
        _, model = bodies("llama", checkpointed=False)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        make_fake(model, mode)
        with monkeypatch.context() as changed, mode, CudaChoices():
            if is_largest is not None:
                changed.setattr("memopt.kernels.base.saved_inputs.is_largest_yet", is_largest)
            peaks.append(measured(model, first=True).peak.nbytes)
    ours, in_one_pass = peaks
    # Behind that another moment makes the peak, not quite a gradient lower.
    assert in_one_pass - ours > 0.8 * BATCH * LENGTH * 256 * 2


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
def test_no_tensor_of_a_step_waits_for_garbage_collection(name: str) -> None:
    """A cycle holds what it refers to until collection happens to run, and the peak of a step depends on when."""
    model, batch = memopt.patch(tiny_model(name).train()), tiny_inputs(name)
    for _ in range(3):
        model(**batch, use_cache=False).loss.backward()
    gc.collect()  # graphs of the walk, whose nodes hold its observers
    gc.collect()  # these observers
    gc.disable()
    try:
        model(**batch, use_cache=False).loss.backward()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [tuple(each.shape) for each in gc.garbage if isinstance(each, torch.Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
