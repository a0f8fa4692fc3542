"""Time and memory of the loss over a vocabulary, forward and backward, on a GPU.

    python -m benchmarks.loss              print the table (a GPU is needed; about a minute)
    python -m benchmarks.loss --check      and exit 1 where the chunked loss takes over 1.10 times the products that it
                                           computes, or more memory than the account says
    python -m benchmarks.loss --account    what it costs by arithmetic, for five models and five ways to train a head;
                                           no GPU, half a minute; with --check exit 1 where a limit is missed
    python -m benchmarks.loss --dry-run    every step on a tiny shape; the numbers mean nothing

8192 x 4096 x 128256 in bf16. `products` are X W^T, dZ W and dZ^T X over all rows, as the vendor's library computes
them: what no exact loss can do without. Everything else takes X to the loss and back to dX and dW, or to dX alone where
the head is frozen (then there are two products). `stock` and `memopt` are head and loss of a Llama, `1 GiB` is
`loss.room=1024`; `torch` is F.linear_cross_entropy, `liger` Liger's, where they are installed. Memory is the peak above
what was there before.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import loss_account
from benchmarks.measure import EXIT_CANNOT_RUN, NO_GPU, Result, Stopwatch, Timing, device_of, document, finish, sentence

MODULE = "benchmarks.loss"
LIMIT = 1.10
#: Provider that is checked -> MiB that it may take beside the gradients; 0: what it takes by default.
CHECKED = {"memopt, chunked": 0, "memopt, 1 GiB": 1024}
PRODUCTS = "products"
#: Bytes: labels, and what an allocator adds to storages of a few numbers a row.
ROUNDING = 2**21

Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """What one row measures."""

    tokens: int
    hidden: int
    vocabulary: int
    frozen: bool

    def account(self, room: int) -> loss_account.Account:
        """What the loss costs by arithmetic."""
        shape = loss_account.Shape("", self.tokens, self.hidden, self.vocabulary)
        return loss_account.account(shape, "frozen" if self.frozen else "trained", room)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where the chunked loss falls short")
    parser.add_argument("--account", action="store_true", help="what it costs by arithmetic, without a GPU")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    arguments = parser.parse_args(argv)
    arguments.plot = None
    given = sys.argv[1:] if argv is None else argv
    if arguments.account:
        arguments.dry_run, found = False, list(loss_account.accounts())
        Console(width=None if sys.stdout.isatty() else 140).print(loss_account.table(found))
        counted = {**document(given, MODULE, dry_run=True, rows=loss_account.rows(found)), "dry_run": False}
        return finish(arguments, counted, lambda: loss_account.misses(found))
    if not arguments.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return EXIT_CANNOT_RUN
    shape = (48, 32, 256) if arguments.dry_run else (8192, 4096, 128256)
    watch = Stopwatch(device_of(arguments.dry_run))
    result = Result(arguments.json, document(given, MODULE, dry_run=arguments.dry_run, limit=LIMIT))
    for frozen in (False, True):
        for row in measure(Case(*shape, frozen), watch, arguments.dry_run):
            result.add(row)
    rows = result.content["rows"]
    Console(width=None if sys.stdout.isatty() else 110).print(table(rows))
    for row in rows:
        if "error" in row:
            print(f"{row['provider']}: {row['error']}")
    return finish(arguments, result.done(), lambda: shortfalls(rows))


def measure(case: Case, watch: Stopwatch, dry_run: bool) -> Iterator[dict[str, Any]]:
    """A row for each provider, the products first; one that fails says why."""
    torch.manual_seed(0)
    device, dtype = device_of(dry_run), torch.float32 if dry_run else torch.bfloat16
    x = torch.randn(case.tokens, case.hidden, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(case.vocabulary, case.hidden, device=device, dtype=dtype) * case.hidden**-0.5
    target = torch.randint(case.vocabulary, (case.tokens,), device=device)
    weight.requires_grad_(not case.frozen)
    makers: dict[str, Callable[[], Step]] = {
        PRODUCTS: lambda: _products(x, weight),
        "stock": lambda: _llama(x, weight, target, None),
        "memopt, chunked": lambda: _llama(x, weight, target, "chunked"),
        "memopt, 1 GiB": lambda: _llama(x, weight, target, "chunked", room=1024),
        "memopt, lean": lambda: _llama(x, weight, target, "lean"),
        "torch": lambda: _torch(x, weight, target),
        "liger": lambda: _liger(x, weight, target),
    }
    base = float("nan")
    for name, make in makers.items():
        row: dict[str, Any] = {"provider": name, **asdict(case)}
        if name in CHECKED and not dry_run:
            counted = case.account(CHECKED[name])
            row |= {"limit": LIMIT * counted.products / counted.least, "beside_bytes": counted.beside}
        try:
            step = make()
            row |= {"gradient_bytes": sum(t.numel() * t.element_size() for t in step())}
            row |= {"peak_bytes": _peak(step, device), **asdict(Timing.of(watch.samples(step)))}
            base = row["median"] if name == PRODUCTS else base
            row["of_products"] = row["median"] / base
        except Exception as failure:  # one provider that fails leaves the others
            row["error"] = sentence(failure)
        yield row


def _products(x: Tensor, weight: Tensor) -> Step:
    with torch.no_grad():
        dz = F.linear(x, weight)

    def step() -> tuple[Tensor, ...]:
        with torch.no_grad():
            F.linear(x, weight)
            return (dz.mm(weight), dz.t().mm(x)) if weight.requires_grad else (dz.mm(weight),)

    return step


def _llama(x: Tensor, weight: Tensor, target: Tensor, method: str | None, room: int = 0) -> Step:
    """The model of one narrow layer is patched; what is run is its head and its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import memopt
    from memopt.plan.recipe import load_recipe

    vocabulary, hidden = weight.shape
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=hidden // 32, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.lm_head.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, weight.requires_grad)
    if method is not None:
        memopt.patch(model, load_recipe("exact-unfolded", [f"loss.method={method}", f"loss.room={room}"]))
    model.model = _Input(x)
    inputs = [x, model.lm_head.weight][: 1 + weight.requires_grad]
    labels = F.pad(target, (1, 0))[None, :-1]  # the loss shifts them back; the last row has none
    return lambda: torch.autograd.grad(model(input_ids=None, labels=labels).loss, inputs)


class _Input(nn.Module):
    """Stands for all of a model before its head."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self._x = x

    def forward(self, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self._x[None])


def _torch(x: Tensor, weight: Tensor, target: Tensor) -> Step:
    inputs = [x, weight][: 1 + weight.requires_grad]
    return lambda: torch.autograd.grad(F.linear_cross_entropy(x, weight, target), inputs)


def _liger(x: Tensor, weight: Tensor, target: Tensor) -> Step:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    inputs = [x, weight][: 1 + weight.requires_grad]
    return lambda: torch.autograd.grad(loss(weight, x, target), inputs)


def _peak(step: Step, device: str) -> int | None:
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def shortfalls(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What `--check` finds wrong, a line each."""
    lines = []
    for row in rows:
        if row["provider"] not in CHECKED:
            continue
        where = f"{row['provider']}, {'frozen' if row['frozen'] else 'trained'} head"
        if "error" in row:
            lines.append(f"{where}: {row['error']}")
            continue
        if row["of_products"] > row["limit"]:
            lines.append(f"{where}: {row['of_products']:.2f} times the products (at most {row['limit']:.2f})")
        most = row["gradient_bytes"] + row["beside_bytes"] + ROUNDING
        if row["peak_bytes"] is not None and row["peak_bytes"] > most:
            lines.append(f"{where}: {row['peak_bytes'] / 2**20:.0f} MiB at the peak (at most {most / 2**20:.0f})")
    return lines


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    result = Table(title="Loss over a vocabulary, forward and backward", title_justify="left")
    for name in ("head", "", "ms", "/ products", "peak MiB", "gradients MiB", "account MiB"):
        result.add_column(name, justify="right" if name not in ("head", "") else "left", no_wrap=True)
    mebibytes: Callable[[int | None], str] = functools.partial(_shown, scale=2**20)
    for row in rows:
        numbers = ("-",) * 5
        if "median" in row:
            sizes = (mebibytes(row.get(key)) for key in ("peak_bytes", "gradient_bytes", "beside_bytes"))
            numbers = (f"{row['median']:.2f}", f"{row['of_products']:.2f}", *sizes)
        result.add_row("frozen" if row["frozen"] else "trained", row["provider"], *numbers)
    return result


def _shown(count: int | None, scale: int) -> str:
    return "-" if count is None else f"{count / scale:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
