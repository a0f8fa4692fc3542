"""The emulated device itself: each property of a GPU that the other tests of this folder stand on."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.device.emulator import build
from tests.device.emulator.install import counting


def test_tensors_lie_on_two_devices_and_operators_do_not_mix_them() -> None:
    one, other = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    assert (str(one.device), str(other.device)) == ("cuda:0", "cuda:1")
    for mixed in (other, torch.ones(3)):
        with pytest.raises(RuntimeError, match="at least two devices"):
            one + mixed
    assert torch.equal((one + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0)), "a number on the CPU may take part"


def test_backward_runs_in_the_thread_of_the_device_with_that_device_current() -> None:
    seen = []
    x = torch.ones(3, device="cuda:1", requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append((threading.get_ident(), torch.cuda.current_device())))
    y.sum().backward()
    ((thread, device),) = seen
    assert thread != threading.get_ident()
    assert device == 1
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_fresh_memory_is_nan_inside_operators_too(dtype: torch.dtype) -> None:
    assert torch.empty_strided((4, 3), (3, 1), dtype=dtype, device="cuda").isnan().all()


def test_what_waits_is_counted_with_its_line_and_pinned_copies_do_not() -> None:
    x, on_host = torch.ones(4, device="cuda"), torch.ones(4)
    with counting() as count:
        x.to("cpu")
        on_host.to("cuda")
        on_host.pin_memory().to("cuda", non_blocking=True)
        x.sum().item()
        (x > 0).nonzero()
        x[x > 0]
        x[x > 0] = torch.ones(4, device="cuda")
        x[x > 0] = 2.0
        x + 1
    assert count.waits.total() == 6
    assert all("test_emulator.py" in place for place in count.waits)


def test_the_mode_that_forbids_waiting_raises_where_something_waits() -> None:
    x = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        x + x
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.sum().item() == 4


def test_launches_are_counted_and_views_are_none() -> None:
    x = torch.ones(4, 4, device="cuda")
    with counting() as count:
        x.t().reshape(2, 8)[0].unsqueeze(0).expand(3, 8).detach()  # the reshape of a transpose copies
        x @ x
    assert count.launches == {"aten::copy_": 1, "aten::mm.out": 1}


def test_the_peak_counts_results_of_operators_and_what_was_freed() -> None:
    x = torch.ones(2**18, device="cuda")  # 1 MiB
    with counting() as count:
        y = x * 2
        del y
        z = x + 1
    assert count.peak == 2**20
    del z


def test_memory_of_the_device_cannot_be_pinned() -> None:
    for empty in (lambda: torch.empty(3, device="cuda", pin_memory=True), lambda: torch.ones(3).cuda().pin_memory()):
        with pytest.raises(RuntimeError, match="can be pinned"):
            empty()


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("kind", [torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.ConvTranspose2d])
def test_a_convolution_is_one_launch_with_the_cpus_values(kind: Any, groups: int) -> None:
    convolution = kind(8, 8, 3, groups=groups)
    x = torch.randn(2, 8, *(5,) * (convolution.weight.dim() - 2))
    convolution(x).sum().backward()
    expected = convolution.weight.grad.clone()
    convolution.zero_grad()
    with counting() as count:
        convolution.cuda()(x.cuda()).sum().backward()
    torch.testing.assert_close(convolution.weight.grad.cpu(), expected)
    assert count.launches["aten::convolution"] == count.launches["aten::convolution_backward"] == 1


def test_the_loss_of_transcripts_reads_their_lengths_and_runs() -> None:
    scores = torch.randn(6, 2, 5)
    given = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([6, 5]), torch.tensor([2, 1])]
    expected = torch.nn.functional.ctc_loss(scores.log_softmax(-1), *given)
    found = torch.nn.functional.ctc_loss(scores.cuda().log_softmax(-1), *(each.cuda() for each in given))
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_a_softmax_of_fp16_may_have_an_fp32_result(function: Any) -> None:
    x = torch.randn(3, 5, dtype=torch.float16)
    on_host, there = x.clone().requires_grad_(), x.cuda().requires_grad_()
    expected, found = (function(each, -1, dtype=torch.float32) for each in (on_host, there))
    (expected**2).sum().backward()
    (found**2).sum().backward()
    assert (found.dtype, there.grad.dtype) == (torch.float32, torch.float16)
    torch.testing.assert_close((found.cpu(), there.grad.cpu()), (expected, on_host.grad))


def test_an_lstm_has_the_cpus_values_and_gradients() -> None:
    model, x = torch.nn.LSTM(4, 6, num_layers=2), torch.randn(5, 2, 4)
    model(x)[0].square().sum().backward()
    expected = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this PyTorch has no cuDNN
        model.cuda()(x.cuda())[0].square().sum().backward()
    torch.testing.assert_close([each.grad.cpu() for each in model.parameters()], expected)


def test_a_file_is_read_onto_the_device_that_its_tensors_were_on_or_another() -> None:
    file = io.BytesIO()
    torch.save(torch.arange(3.0, device="cuda:1"), file)
    for place, expected in ((None, "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")):
        file.seek(0)
        found = torch.load(file, map_location=place)
        assert (str(found.device), found.tolist()) == (expected, [0.0, 1.0, 2.0])


def test_generators_of_the_device_are_its_own_and_their_state_is_restored() -> None:
    torch.manual_seed(3)
    first = torch.randn(4, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.randn(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="cuda"), second)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="cuda"), first)
    torch.manual_seed(3)
    assert not torch.equal(torch.randn(4), first.cpu())


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_numbers_are_drawn_from_the_generator_of_the_tensors_device(device: str) -> None:
    x = torch.ones(64, device=device)
    for draw in (
        lambda: torch.nn.functional.dropout(x, 0.5),
        lambda: torch.randn_like(x),
        lambda: torch.bernoulli(x / 2),
    ):
        states = torch.get_rng_state(), *torch.cuda.get_rng_state_all()
        draw()
        after = torch.get_rng_state(), *torch.cuda.get_rng_state_all()
        changed = [not torch.equal(*each) for each in zip(states, after, strict=True)]
        assert changed == [False, device == "cuda:0", device == "cuda:1"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_dropouts_of_the_device(use_reentrant: bool) -> None:
    x = torch.ones(64, device="cuda", requires_grad=True)
    y = checkpoint(torch.nn.functional.dropout, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_indices_on_the_cpu_are_copied_to_the_device() -> None:
    x, indices = torch.ones(4, device="cuda"), torch.tensor([0, 2])
    with counting() as count:
        x[indices]
        x[indices] = torch.zeros(2, device="cuda")
    assert count.waits.total() == 2


def test_a_kernel_that_is_launched_on_another_device_than_its_tensors_is_an_error() -> None:
    import triton

    @triton.jit
    def kernel(x, y):  # type: ignore[no-untyped-def]
        pass

    there = torch.ones(1, device="cuda:1")
    with torch.cuda.device(1):
        kernel[(1,)](there, there)
    with pytest.raises(RuntimeError, match="launched on cuda:0 with a tensor on cuda:1"):
        kernel[(1,)](there, there)


def test_that_it_cannot_run_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.device.emulator", __file__]

    def said(**environment: str) -> str:
        run = subprocess.run(command, capture_output=True, text=True, env={"PATH": "", **environment}, check=False)
        assert run.returncode == 2
        return run.stderr

    prefix = "There is no emulated device: "
    assert said(CXX="/no/compiler").startswith(f"{prefix}the C++ compiler /no/compiler does not run")
    damaged = tmp_path / build.build().name
    damaged.write_bytes(b"no library")
    compiler = os.environ.get("CXX") or shutil.which("g++") or ""
    assert said(CXX=compiler, PATH=os.environ["PATH"], MEMOPT_DEVICE_CACHE=str(tmp_path)).startswith(
        f"{prefix}{damaged}"
    )
    command[-1] = "no_such_script.py"
    assert said() == "There is no script no_such_script.py.\n"
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(build.CannotBuild, match="imported already"):
        build.load()
