"""The machinery that both benchmarks share: workers, statistics, verdicts. Nothing here is timed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from benchmarks import block, kernel_tables, kernels
from benchmarks.kernel_cases import BACKWARD, BACKWARD_RECOMPUTE, EPS, FORWARD, OPS, RECOMPUTE
from benchmarks.measure import NO_GPU, Timing, Worker, sentence
from benchmarks.plot import Bar, chart

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
@pytest.mark.parametrize("benchmark", [kernels, block], ids=["kernels", "block"])
def test_without_a_gpu_a_check_ends_with_code_2_and_one_sentence(benchmark, capsys):
    assert benchmark.main(["--check"]) == 2
    captured = capsys.readouterr()
    assert captured.err == NO_GPU + "\n"
    assert not captured.out


def test_a_worker_answers_in_its_own_process_and_survives_a_bad_request():
    worker = Worker(kernels.MODULE, "eager", dry_run=True)
    try:
        assert "error" in worker.answer_to({"no": "shape"})
        answer = worker.answer_to({"op": "ReLU^2", "tokens": 4, "hidden": 8, "dtype": "float32"})
        assert [row["direction"] for row in answer["rows"]] == [FORWARD, BACKWARD]
        assert all("median" in row for row in answer["rows"])
    finally:
        worker.close()


def test_a_worker_that_cannot_start_is_reported_with_its_last_words():
    worker = Worker("benchmarks.no_such_benchmark", "eager", dry_run=True)
    try:
        assert "no_such_benchmark" in worker.answer_to({})["error"]
    finally:
        worker.close()


def test_out_of_memory_is_two_words():
    assert sentence(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")) == "out of memory"


def test_a_timing_is_a_median_with_quartiles():
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Timing(3.0, 1.5, 4.5, 5)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_ratios_are_taken_within_a_round():
    drifting = [1.0, 2.0, 4.0, 8.0]
    assert block.ratio([2 * value for value in drifting], drifting) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # bytes a row of 1000 bf16 elements, from the formulas; statistics of 4 bytes a row, vectors once
        ("RMSNorm", {FORWARD: 6000, RECOMPUTE: 4000, BACKWARD: 6000}),
        ("LayerNorm, no affine", {FORWARD: 4000, BACKWARD: 6000}),
        ("SwiGLU", {FORWARD: 6000, BACKWARD: 10000, BACKWARD_RECOMPUTE: 12000}),
        ("gelu_new", {FORWARD: 4000, BACKWARD: 6000, BACKWARD_RECOMPUTE: 8000}),
    ],
)
def test_floors_count_every_tensor_once(name, expected):
    op = OPS[name]
    floors = {direction: op.floor(direction, 10**6, 1000, 2) / 10**6 for direction in op.passes}
    assert floors == pytest.approx(expected, abs=4.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_stock_rms_norm_is_the_one_of_transformers(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    op = OPS["RMSNorm"]
    x, weight = op.inputs(5, 64, dtype, "cpu")
    module = LlamaRMSNorm(64, EPS).to(dtype)
    module.weight.data.copy_(weight)
    assert torch.equal(op.stock(x, weight), module(x))


def test_the_stock_gelu_new_is_the_one_of_transformers():
    from transformers.activations import NewGELUActivation

    z = torch.randn(5, 64)
    assert torch.equal(OPS["gelu_new"].stock(z), NewGELUActivation()(z))


@pytest.mark.parametrize("provider", ["memopt", "eager"])
@pytest.mark.parametrize("name", OPS)
def test_every_operator_of_every_provider_is_right(name, provider, monkeypatch):
    if provider == "memopt":  # launchers need a GPU or the interpreter; the operators run anywhere
        op = OPS[name]
        monkeypatch.setitem(OPS, name, type(op)(**{**vars(op), "launchers": lambda inputs, dy: {}}))
    rows = kernels.measure(kernels.Shape(name, 4, 32, "float32"), provider, dry_run=True)
    assert [row["direction"] for row in rows] == [FORWARD, BACKWARD]
    assert all(row.get("error") is None for row in rows)


def kernel_rows(share):
    tokens, hidden, dtype = kernel_tables.CHECKED
    return [
        {
            "op": op.name,
            "direction": direction,
            "tokens": tokens,
            "hidden": hidden,
            "dtype": dtype,
            "provider": provider,
        }
        | {"median": median}
        for op in OPS.values()
        for direction in op.passes
        for provider, median in (("kernel", 1.0), ("copy", share))
    ]


def test_kernels_at_the_required_share_of_a_copy_pass():
    assert kernel_tables.shortfalls(kernel_rows(0.86)) == []


def test_a_kernel_below_the_required_share_or_without_a_time_falls_short():
    rows = kernel_rows(0.86)
    rows[1]["median"] = 0.5
    del rows[2]["median"]
    lines = kernel_tables.shortfalls(rows)
    assert len(lines) == 2
    assert "reaches 50 %" in lines[0]
    assert "no valid time" in lines[1]


def block_case(memopt=1.0, again=(0.995, 1.005), units=11.4, liger=1.0):
    def row(provider, ratio, interval=(1.0, 1.0)):
        return {
            "provider": provider,
            "step_ms": ratio,
            "ratio_to_eager": ratio,
            "ratio_to_eager_interval": interval,
            "units_per_block": units,
        }

    return {
        "target_units": 11.5,
        "rows": [row("eager", 1.0), row("eager again", 1.0, again), row("memopt", memopt), row("memopt, folded", 0.9)],
        "ratios_to_liger": {"memopt": {"ratio": liger, "ratio_interval": (liger, liger)}},
    }


def test_a_patched_model_within_the_noise_passes():
    assert block.shortfalls(block_case(memopt=1.004, liger=1.004)) == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (block_case(memopt=1.02), "of eager's time"),
        (block_case(liger=1.02), "of Liger's time"),
        (block_case(units=11.6), "11.60 units a block"),
        (block_case(again=(0.9, 1.1)), "cannot judge"),
    ],
)
def test_slower_larger_or_noisy_runs_fall_short(case, words):
    lines = block.shortfalls(case)
    assert lines
    assert all(words in line for line in lines)


def test_a_chart_is_valid_svg_with_a_bar_for_each_value():
    svg = chart("a < b", [Bar("one", 1.0, "1.00", ours=True), Bar("two & three", None, "not supported", ours=False)])
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
    assert {"a < b", "one", "two & three", "not supported"} <= set(texts)


class InThisProcess:
    """A worker without a process: imports are paid once."""

    def __init__(self, module, provider, *, dry_run, variables=None):
        self.provider, self._handle, self._answers = provider, self.handler(provider), []

    def handler(self, provider):
        return block.Trainer(provider, dry_run=True).handle

    def send(self, request):
        try:
            self._answers.append(json.loads(json.dumps(self._handle(dict(request)))))
        except Exception as error:
            self._answers.append({"error": sentence(error)})

    def receive(self):
        return self._answers.pop()

    def answer_to(self, request):
        self.send(request)
        return self.receive()

    def close(self):
        pass


class KernelsInThisProcess(InThisProcess):
    def handler(self, provider):
        return lambda request: {"rows": kernels.measure(kernels.Shape(**request), provider, dry_run=True)}


def test_a_dry_run_of_the_kernels_prints_a_table_and_writes_json_and_a_chart(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(kernels, "Worker", KernelsInThisProcess)
    for name in list(OPS):
        if name not in ("RMSNorm", "SwiGLU"):
            monkeypatch.delitem(OPS, name)
    result, picture = tmp_path / "new" / "kernels.json", tmp_path / "kernels.svg"
    assert kernels.main(["--dry-run", "--json", str(result), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "SwiGLU" in printed
    assert printed.endswith("dry run: numbers mean nothing\n")
    content = json.loads(result.read_text())
    assert content["command"].startswith("python -m benchmarks.kernels --dry-run")
    assert torch.__version__.startswith(content["versions"]["torch"])
    timed = {row["provider"] for row in content["rows"] if "median" in row}
    assert {"copy", "memopt", "eager", "compile"} <= timed
    ElementTree.fromstring(picture.read_text())


def test_a_dry_run_of_the_blocks_prints_a_table_and_writes_json_and_a_chart(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(block, "Worker", InThisProcess)
    result, picture = tmp_path / "block.json", tmp_path / "block.svg"
    arguments = ["--dry-run", "--no-compile", "--case", "Llama, LoRA", "--json", str(result), "--plot", str(picture)]
    assert block.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "memopt, folded" in printed
    assert printed.endswith("dry run: numbers mean nothing\n")
    rows = {row["provider"]: row for row in json.loads(result.read_text())["cases"][0]["rows"]}
    stock, patched, folded = (rows[name]["units_per_block"] for name in ("eager", "memopt", "memopt, folded"))
    assert folded <= patched <= 0.6 * stock
    assert rows["memopt"]["loss"] == pytest.approx(rows["eager"]["loss"], rel=1e-2)
    ElementTree.fromstring(picture.read_text())
