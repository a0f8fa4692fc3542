"""Run real steps of a model with random weights in a fresh process, to compare them with a prediction."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from memopt.errors import ModelError
from memopt.prediction.optimizers import RUN, make_optimizer
from memopt.prediction.peak import predict
from memopt.prediction.setup import Setup
from memopt.torch_compat import run_backward, tree_map
from memopt.trace.arguments import DTYPES, example_of, step_arguments
from memopt.trace.estimate import build_trained, quiet
from memopt.trace.events import peak_of
from memopt.trace.fake import replace_tensors
from memopt.trace.quantised import Quantisation, kept_modules, quantisation_of
from memopt.trace.storages import distinct_bytes
from memopt.trace.timeline import losses_of, record
from memopt.trace.trace import parameters_of, step_events
from memopt.trace.training import Step
from memopt.walk.models.config import one_line

_SECONDS = 3600


@dataclass(frozen=True)
class Measurement:
    """Bytes in the second step: on a CUDA device as its allocator reports them, else bytes of live storages."""

    device: str
    allocated: int
    reserved: int | None
    """Bytes that the CUDA caching allocator reserves; None on the CPU."""
    rss: int
    """The most resident memory of the process."""


@dataclass(frozen=True)
class Comparison:
    """A prediction and a measurement on this machine's device, in bytes."""

    moment: str
    """When in the step the predicted peak falls."""
    predicted: int
    """Bytes of live storages at the peak, workspaces included."""
    predicted_reserved: int
    measured: Measurement


def compare(of: Step, setup: Setup | None = None) -> Comparison:
    """Predict a step and run it, on the CUDA device if there is one, else on the CPU; raises as `measure`."""
    of = of.trained(cuda_kernels=torch.cuda.is_available())
    if of.training.train == "qlora":
        _check_bitsandbytes()
    found = predict(of, setup)
    free = psutil.virtual_memory().available
    if not torch.cuda.is_available() and found.peak.nbytes > free:
        raise ModelError(
            f"The step takes {found.peak.nbytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are available.",
            "Use a smaller --batch or --seq, or leave --measure out.",
        )
    return Comparison(found.peak.moment, found.peak.nbytes, found.reserved, measure(of, setup))


def check_measurable(setup: Setup) -> None:
    """Raise a ModelError if a step with this setup cannot be measured: it has several devices, an optimizer that is not
    in `RUN`, or released gradients."""
    if setup.devices > 1 or setup.release_gradients or setup.optimizer not in RUN:
        what = "several devices" if setup.devices > 1 else "gradients that are released"
        what = what if setup.optimizer in RUN else f"optimizer {setup.optimizer}"
        raise ModelError(f"Steps with {what} are predicted, not measured.", "Leave --measure out.")


def measure(of: Step, setup: Setup | None = None) -> Measurement:
    """Train for two steps, on the CUDA device if there is one, and measure the second. Raises a ModelError if the steps
    cannot run: out of memory, a missing library, a setup of several devices."""
    setup = setup or Setup()
    check_measurable(setup)
    try:
        found = _apart(of, setup)
    except (OSError, EOFError, pickle.PickleError, subprocess.SubprocessError) as error:  # the process was killed
        raise _failed(error) from error
    if isinstance(found, ModelError):
        raise found
    return found


def _failed(error: Exception) -> ModelError:
    return ModelError(
        f"The steps could not be measured: {type(error).__name__}: {one_line(error)}.",
        "Use a smaller --batch or --seq.",
    )


def _apart(*given: Any) -> Measurement | ModelError:
    """Run `_measured` in a fresh process; a process of `multiprocessing` would run the caller's script again."""
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", "from memopt.prediction.measure import answer; answer()"],
        input=pickle.dumps(given),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        timeout=_SECONDS,
        check=True,
    )
    return cast("Measurement | ModelError", pickle.loads(done.stdout))


def answer() -> None:
    """The process of :func:`measure`: reads its arguments from stdin, writes the measurement or error to stdout."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries' prints must not mix with the result
    found: Measurement | ModelError
    try:
        found = _measured(*pickle.load(sys.stdin.buffer))
    except ModelError as error:
        found = error
    except Exception as error:
        found = _failed(error)
    with results:
        pickle.dump(found, results)


@quiet()
def _measured(of: Step, setup: Setup) -> Measurement:
    cuda = torch.cuda.is_available()
    step = RealStep(of, setup, device="cuda" if cuda else "cpu")
    step.run()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step.run()
    rss = _peak_rss()
    if cuda:
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return Measurement(torch.cuda.get_device_name(), allocated, reserved, rss)
    return Measurement("cpu", step.live_peak(), None, rss)


class RealStep:
    """A model with random weights, a batch and an optimizer."""

    def __init__(self, of: Step, setup: Setup, *, device: str = "cpu") -> None:
        training = of.training
        built = build_trained(of, quantised=_by_bitsandbytes)
        self.model = built.trained
        replace_tensors(self.model, _random(torch.device(device)))
        _pack(self.model, quantisation_of(of.config) or Quantisation())
        source = example_of(of.config, of.sites, training) if of.inputs is None else of.inputs
        arguments = step_arguments(built.model, training, source, real=True)
        self.arguments = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, arguments)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = make_optimizer(trained, setup, foreach=device != "cpu")
        _, autocast = DTYPES[training.precision]
        self._autocast: Callable[[], Any] = contextlib.nullcontext
        if autocast is not None:
            self._autocast = lambda: torch.autocast(device, autocast)
        self._accumulation = setup.accumulation

    def run(self) -> None:
        """One step."""
        for _ in range(self._accumulation):
            output = self.forward()
            run_backward(*losses_of(output))
            del output
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self) -> Any:
        """The model's output."""
        with self._autocast():
            return self.model(**self.arguments)

    def resident(self) -> int:
        """Bytes of weights, buffers, batch, optimizer states and gradients."""
        gradients = [each.grad for each in self.model.parameters()]
        others = distinct_bytes([self.arguments, list(self.optimizer.state.values()), gradients])
        return sum(each.nbytes for each in parameters_of(self.model)) + others

    def live_peak(self) -> int:
        """The most bytes of live storages over one more step."""
        for _ in range(self._accumulation - 1):
            run_backward(*losses_of(self.forward()))
        gc.collect()
        resident = self.resident()
        found = record(self.model, self.forward, then=self.optimizer.step)
        self.optimizer.zero_grad()
        return resident + peak_of((), step_events(found)[0]).nbytes


def _check_bitsandbytes() -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("Steps with 4-bit weights need bitsandbytes to be measured.", "pip install bitsandbytes")


def _by_bitsandbytes(model: PreTrainedModel, how: Quantisation, dtype: torch.dtype, *, cuda: bool) -> None:
    """Like `memopt.trace.quantised.quantise`, with the linears of bitsandbytes; their weights are packed later."""
    _check_bitsandbytes()
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=how.nested,
        bnb_4bit_compute_dtype=how.compute_dtype or dtype,
    )
    replace_with_bnb_linear(model, kept_modules(model, how), settings)


def _pack(model: nn.Module, how: Quantisation) -> None:
    for module in model.modules():
        if type(module).__module__ == "bitsandbytes.nn.modules":
            from bitsandbytes.nn import Params4bit

            linear: Any = module
            weight = linear.weight.data.to(linear.compute_dtype)
            settings = {"compress_statistics": how.nested, "quant_type": "nf4", "module": linear}
            linear.weight = Params4bit(weight, requires_grad=False, **settings).to(weight.device)


def _random(device: torch.device) -> Callable[[Tensor], Tensor]:
    def values(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.detach().to(device)
        real = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter) and real.is_floating_point():
            return real.normal_(std=0.02)
        return real.fill_(1)  # the variance of a batch norm is positive

    return values


def _peak_rss() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return 1024 * int(line.split()[1])
