"""The account of long context is the peak of a real step at a reduced width, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from memopt.patches.checkpointing.offload import OffloadedInputs
from memopt.plan.recipe import load_recipe
from memopt.prediction.measure import RealStep
from memopt.prediction.peak import predict
from memopt.prediction.setup import Setup
from memopt.saved import host
from memopt.saved.host import are_copies_traced, copies_traced, host_bytes
from memopt.trace.emulate import CudaChoices
from memopt.trace.trace import Step
from memopt.trace.training import Train, Training
from memopt.walk.observe import walk_config

TOKENS, HIDDEN, BLOCKS, HEADS = 2048, 128, 3, 8
SETUP = Setup("sgd")


def step(train: Train, *settings: str, blocks: int = BLOCKS) -> Step:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=512, num_hidden_layers=blocks,
        num_attention_heads=HEADS, num_key_value_heads=2, dtype="float32",
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    recipe = load_recipe("long-context", ["tiles.room=1", *settings])
    return Step(config, Training(1, TOKENS, precision="fp32", train=train), walk_config(config), recipe)


def peaks(of: Step) -> tuple[int, int]:
    """Live bytes at the peak of the second step with AdamW on the CPU: predicted, and of a real step."""
    of = of.trained(cuda_kernels=False)
    real = RealStep(of, Setup())
    real.run()
    return predict(of, Setup()).peak.nbytes, real.live_peak()


@pytest.mark.parametrize("keep", ["none", "attention"])
@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.rotates(3)
def test_without_offloading_to_the_byte(train: Train, keep: str) -> None:
    predicted, measured = peaks(step(train, "checkpointing.offload=none", f"checkpointing.keep={keep}"))
    assert measured == predicted


@pytest.mark.parametrize(("keep", "outputs"), [("none", 0), ("attention", 1)])
@pytest.mark.rotates(3)
def test_what_waits_in_cpu_memory_is_beside_it(keep: str, outputs: int) -> None:
    """On the CPU it is measured too: inputs, outputs of attention and their row statistics, in fp32."""
    predicted, measured = peaks(step("full", f"checkpointing.keep={keep}"))
    waits = BLOCKS * TOKENS * (HIDDEN + outputs * (HIDDEN + HEADS)) * 4
    assert predicted < measured <= predicted + waits


def test_cpu_memory_is_counted_as_it_is_allocated_beside_a_gpu() -> None:
    of, tokens = step("full", "checkpointing.keep=none"), 1001
    nbytes = tokens * HIDDEN * 4
    waits = {
        kernels: predict(replace(of, training=replace(of.training, seq=tokens, cuda_kernels=kernels))).offloaded
        for kernels in (False, True)
    }
    assert waits == {False: BLOCKS * nbytes, True: BLOCKS * host_bytes(nbytes)}
    assert nbytes < host_bytes(nbytes)


class Ordered:
    """A stream, and an event on it, of a device that runs everything at once."""

    def wait_stream(self, other: Ordered) -> None: ...

    def wait_event(self, event: Ordered) -> None: ...

    def record_event(self) -> Ordered:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize("keep", ["none", "attention"])
def test_beside_a_gpu_the_last_offloaded_tensors_stay_until_backward(
    keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block alone is offloaded; nothing behind it waits for its copies."""
    recipe = load_recipe(
        "exact-levels", ["checkpointing.n=6", "checkpointing.offload=input", f"checkpointing.keep={keep}"]
    )
    of = replace(step("lora", blocks=6).trained(cuda_kernels=False, seq=256), recipe=recipe)
    without_copies = predict(of, SETUP).peak.nbytes
    with copies_traced():
        found = predict(of, SETUP)
    real = RealStep(of, SETUP)
    monkeypatch.setattr(OffloadedInputs, "stream", lambda self, device: Ordered())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Ordered())
    monkeypatch.setattr(host, "_page_locked", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    real.run()
    assert real.live_peak() == found.peak.nbytes + found.offloaded
    assert found.peak.nbytes > without_copies


def test_a_trace_of_a_gpu_holds_offloaded_tensors_for_their_copies() -> None:
    assert not are_copies_traced()
    with CudaChoices():
        assert are_copies_traced()
    assert not are_copies_traced()
