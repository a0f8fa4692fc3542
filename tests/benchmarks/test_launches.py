"""The account of launches: what it computes of counts, and its verdict. The counts need the emulated device."""

from collections import Counter

from benchmarks import launches
from benchmarks.launches import BF16, FULL, LAYERS, Case

CASE = Case("bert", FULL, BF16)
STOCK = {"aten::mm.out": 3, "aten::copy_": 1}


def row(monkeypatch, patched):
    """The row of a model whose stock block launches `STOCK`, its patched block `patched`, and its head one product."""
    of_block = {False: STOCK, True: patched}

    def count(case, is_patched, layers, _):
        return Counter({name: layers * each for name, each in of_block[is_patched].items()}) + Counter(["aten::mm.out"])

    monkeypatch.setattr(launches, "_counted", count)
    return launches.measure(CASE)


def test_a_block_launches_what_more_blocks_launch_more(monkeypatch):
    found = row(monkeypatch, {"aten::mm.out": 3, "norm_kernel": 1})
    assert (found.stock, found.patched) == (4, 4)
    assert found.more == {"aten::copy_": -1, "norm_kernel": 1}
    assert found.passed


def test_a_launch_beyond_stocks_fails(monkeypatch, capsys):
    found = row(monkeypatch, {"aten::mm.out": 3, "norm_kernel": 2})
    assert not found.passed
    monkeypatch.setattr(launches, "measure", lambda case: found)
    monkeypatch.setattr("sys.argv", ["launches", "--check", "--models", "bert"])
    assert launches.main() == 1
    assert "bert, full, bf16: 5 launches, stock 4" in capsys.readouterr().err


def test_a_step_is_counted_after_the_scopes_have_seen_their_blocks(monkeypatch):
    steps = []
    monkeypatch.setattr(launches, "built", lambda case, layers: (Model(steps), {}))
    launches._counted(CASE, False, LAYERS[0], lambda step: Counter(steps=len(steps)))
    assert len(steps) == launches._WARM_UP


class Model:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self):
        self.steps.append(1)
        return type("Output", (), {"loss": type("Loss", (), {"backward": lambda self: None})()})

    def zero_grad(self, set_to_none):
        pass
