"""The answer of a report, from plain data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.errors import ModelError
from memopt.plan.recipe import load_recipe
from memopt.prediction import measure
from memopt.prediction.alternatives import headline
from memopt.prediction.headline import Headline, Largest, Way
from memopt.reporting.terminal import Fit, headline_tables
from memopt.reporting.text import as_text
from memopt.trace.training import Request, Step, Training
from tests.trace.builders import named_config, sites_of

GIB = 1 << 30
PARTS = {"weights": 15 * GIB, "optimizer states": 2 * GIB, "saved tensors": 6 * GIB, "loss": GIB}
STOCK = Way(
    "stock", "", 25 * GIB, GIB // 2, 24 * GIB, "loss", "lm_head", PARTS, 1.0, 1.0, 0.0, Largest(0), Largest(2048)
)
MEMOPT = replace(
    STOCK,
    name="memopt",
    how="memopt.patch(model)",
    total=20 * GIB,
    moment="backward",
    where="base_model.model.model.layers.31.mlp.down_proj",
    parts={**PARTS, "saved tensors": 2 * GIB, "loss": 0},
    moved=0.8,
    batch=Largest(3),
    seq=Largest(8192, is_all=True),
)
CHECKPOINTED = replace(MEMOPT, name="memopt + checkpointing", total=18 * GIB, flops=1.3, batch=Largest(9))
INT8 = replace(MEMOPT, name="memopt, int8", total=19 * GIB, gradient_error=0.1, accuracy="10% off")
HEADLINE = Headline(
    "acme/llama",
    "LlamaForCausalLM",
    "exact-unfolded",
    "batch 1 x 8192 tokens, adamw",
    STOCK,
    MEMOPT,
    card="24 GiB",
    memory=24 * GIB,
    others=(CHECKPOINTED, INT8),
    remedies=("memopt + checkpointing: batch 9 for 30 % more FLOPs",),
)


def test_six_lines_answer_first_and_one_table_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = as_text(headline_tables(HEADLINE)).splitlines()
    assert [what for what, _ in HEADLINE.lines()] == ["fits", "peak", "of it", "saved", "largest", "next"]
    starts = [next(k for k, line in enumerate(lines) if line.startswith(f"{what} ")) for what, _ in HEADLINE.lines()]
    assert starts == sorted(starts)
    assert starts[-1] < next(k for k, line in enumerate(lines) if line.startswith("way to train")) < 16
    assert max(map(len, lines)) <= 80


def test_what_fits_fits_with_its_margin() -> None:
    assert MEMOPT.fits(20 * GIB + GIB // 2)
    assert not MEMOPT.fits(20 * GIB + GIB // 2 - 1)
    assert "with memopt yes (3.5 GiB to spare), stock no (1.5 GiB too much)" in dict(HEADLINE.lines())["fits"]


def test_the_peak_is_where_a_user_finds_it() -> None:
    assert dict(HEADLINE.lines())["peak"] == "20.0 GiB in backward (model.layers.31); stock 25.0 GiB in the loss"


def test_every_byte_of_the_peak_is_named_once() -> None:
    for way in HEADLINE.ways():
        assert sum(way.by_what().values()) == way.total
    assert STOCK.by_what()["optimizer"] == 2 * GIB


def test_a_small_peak_is_printed_in_mib() -> None:
    sizes = {"weights": 44 << 20, "saved tensors": 5 << 19}
    small = replace(MEMOPT, total=560 << 20, parts=sizes)
    stock = replace(small, total=624 << 20, parts={**sizes, "loss": GIB >> 4})
    lines = dict(replace(HEADLINE, stock=stock, patched=small).lines())
    assert "weights 44, gradients 0, optimizer 0, saved activations 2.5, loss 0, other 514 MiB" in lines["of it"]
    assert lines["saved"].endswith(": loss 64 -> 0 MiB")


def test_where_memopt_saves_nothing_the_answer_says_why() -> None:
    fixed = {"weights": 15 * GIB, "gradients": 15 * GIB, "optimizer states": 30 * GIB}
    same = replace(STOCK, total=62 * GIB, peak=60 * GIB, moment="optimizer step", parts=fixed)
    more = replace(same, name="memopt", total=64 * GIB)
    equal, larger, live = (
        dict(replace(HEADLINE, stock=same, patched=patched).lines())["saved"]
        for patched in (replace(same, name="memopt"), more, replace(more, peak=61 * GIB))
    )
    assert equal.startswith(
        "nothing: the peak is in the optimizer's step, where weights, gradients and optimizer take 60.0"
    )
    assert "segments" not in equal
    assert "holds 2.0 GiB more in partly used segments" in larger
    assert "with memopt 1.0 GiB more live at the peak" in live
    assert live.endswith("train this without memopt")


def test_what_fits_at_no_size_is_said_in_words() -> None:
    none = replace(MEMOPT, batch=Largest(0), seq=Largest(0))
    for stock, said in ((Largest(0), "nor does stock"), (Largest(2), "stock 2")):
        found = replace(HEADLINE, stock=replace(STOCK, batch=stock, seq=Largest(0)), patched=none)
        assert dict(found.lines())["largest"] == f"does not fit at batch 1 ({said})"
        assert "none" not in as_text(headline_tables(found))


def test_the_column_that_decides_has_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tight = replace(HEADLINE, memory=20 * GIB + GIB // 4)
    row = next(line for line in as_text(headline_tables(tight)).splitlines() if line.startswith("memopt  "))
    assert row.split()[1:5] == ["20.0", "GiB", "20.5", "no"]


def test_the_answer_has_fields_and_prints_as_the_command_does() -> None:
    answer = Fit(**vars(HEADLINE))
    assert str(answer) == as_text(headline_tables(HEADLINE))
    assert (answer.fits, answer.largest_batch, answer.longest_sequence) == (True, 3, 8192)
    assert answer.peak_bytes["memopt"]["saved activations"] == 2 * GIB
    assert sum(answer.peak_bytes["stock"].values()) == STOCK.total
    assert replace(answer, card=None, memory=None).fits is None


def test_the_document_says_where_the_search_of_the_batch_ended() -> None:
    ways = replace(HEADLINE, stock=replace(STOCK, batch=Largest(512, is_all=True))).to_dict()["ways"]
    assert [(way["largest_batch"], way["larger_batch_may_fit"]) for way in ways[:2]] == [(512, True), (3, False)]


def test_the_longest_sequences_are_a_line_a_column_and_in_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ways = [replace(way, batch=None) for way in HEADLINE.ways()]
    ways.append(replace(ways[2], name="long-context", flops=1.4))
    lengths = [Largest(2048), Largest(8192), Largest(4096), Largest(16384), Largest(65536, offloaded=40 * GIB)]
    ways = [replace(way, seq=seq) for way, seq in zip(ways, lengths, strict=True)]
    found = replace(HEADLINE, stock=ways[0], patched=ways[1], others=tuple(ways[2:]))
    line = dict(found.lines())["longest"]
    # Checkpointing is more work for less here, and int8 is not exact.
    assert line == "long-context 65536 tokens (40.0 GiB of CPU memory); memopt 8192 tokens"
    text = as_text(headline_tables(found)).splitlines()
    assert max(map(len, text)) <= 80
    head = next(row for row in text if row.startswith("way to train"))
    assert head.split()[3:] == ["peak", "FLOPs", "moved", "longest", "on", "CPU", "gradients"]
    assert next(row for row in text if row.startswith("long-context")).split()[7:] == ["65536", "40.0", "GiB", "exact"]
    document = found.to_dict()["ways"][-1]
    assert (document["longest_sequence"], document["longest_sequence_cpu_bytes"]) == (65536, 40 * GIB)
    short = replace(found, stock=replace(ways[0], seq=Largest(0)), patched=replace(ways[1], seq=Largest(0)), others=())
    assert dict(short.lines())["longest"] == "no way fits 24 GiB, at any length"


def test_approximate_ways_say_so_and_without_a_card_there_is_no_table() -> None:
    text = as_text(headline_tables(HEADLINE))
    assert text.count("exact") == 4  # the recipe's name, and three ways
    assert "10% off" in text
    alone = replace(HEADLINE, card=None, memory=None, others=(), remedies=())
    assert [what for what, _ in alone.lines()][:1] == ["peak"]
    assert "way to train" not in as_text(headline_tables(alone))
    assert HEADLINE.to_dict()["ways"][3]["gradient_error"] == 0.1


def test_a_measurement_that_needs_bitsandbytes_says_so_before_anything_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = named_config("llama")
    about = Step(config, Training(1, 8, train="qlora"), sites_of(config), load_recipe("exact-unfolded"))
    monkeypatch.setattr(measure, "predict", lambda *_, **__: pytest.fail("traced"))
    monkeypatch.setattr(measure.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="need bitsandbytes to be measured"):
        measure.compare(about)


def test_a_card_smaller_than_a_context_is_refused_in_mib() -> None:
    config = named_config("vit")
    about = Step(config, Training(1, None, train="qlora"), sites_of(config), load_recipe("exact-unfolded"))
    remedy = headline(Request("a model"), gpu="40MiB", step=about).remedies[0]
    assert remedy == "nothing fits: the CUDA context alone takes 512 MiB; a larger card"
