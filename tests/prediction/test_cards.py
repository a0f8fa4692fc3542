"""Cards by name and by size."""

from __future__ import annotations

from pathlib import Path

import pytest

import memopt
from memopt.errors import UsageError
from memopt.prediction.cards import CARDS, check_attention, find_card
from memopt.prediction.setup import GIB
from tests.factories import tiny_model


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("a100-40gb", "A100 40GB"),
        ("RTX4090 24GB", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100-pcie", "H100 PCIe"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA A10G", "A10G"),
        ("a10", "A10"),
        ("6000-ada", "RTX 6000 Ada"),
        ("rtx6000", "RTX 6000 Ada"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_card_is_found_by_what_people_and_devices_call_it(text: str, name: str) -> None:
    assert find_card(text).name == name


def test_a_size_is_taken_by_its_unit() -> None:
    assert find_card("24GiB").memory == 24 * GIB
    assert find_card("24 gb").memory == 24 * 10**9
    assert find_card("1.5TiB").memory == 1536 * GIB
    assert not find_card("24GiB").is_named


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a100", "a100-40gb, a100-80gb"),
        ("24", "24GiB"),
        ("24G", "24GiB"),
        ("rtx4091", "rtx4090"),
        ("rtx409", "rtx4090"),
        ("rtx40", "rtx4080"),
        ("0GiB", "no memory"),
        ("", "Known"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090"),
        ("RTX 3080 Ti", "rtx3080"),
        ("RTX 3060 8GB", "rtx3060"),
        ("NVIDIA H100 NVL", "h100"),
    ],
)
def test_what_names_no_single_card_is_said_with_what_would(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        find_card(text)


def test_every_card_is_found_by_its_own_name_and_less_of_it_is_usable_than_it_is_sold_with() -> None:
    sold = {16, 24, 32, 40, 48, 80, 10, 11, 12, 141, 180, 192}
    for card in CARDS:
        assert find_card(card.name) == card
        assert any(0 < gib - card.memory / GIB < 0.1 * gib for gib in sold)
        assert card.flops > card.flops_fp32 > 0
        assert card.bandwidth > card.link


@pytest.mark.parametrize("name", ["t4", "v100-16gb", "rtx2080ti"])
def test_flash_attentions_packages_need_ampere(name: str) -> None:
    with pytest.raises(UsageError, match=r"flash_attention_2 runs on Ampere .* Use sdpa"):
        check_attention(find_card(name), "flash_attention_2")
    check_attention(find_card(name), "sdpa")
    check_attention(find_card(name), None)


def test_a_report_for_a_card_that_lacks_the_attention_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(UsageError, match="T4 is older"):
        memopt.fit(tmp_path / "llama", gpu="t4", attention="flash_attention_2")


def test_newer_cards_and_sizes_run_every_attention() -> None:
    for name in ("rtx3060", "a100-80gb", "l4", "h100", "mi300x", "24GiB"):
        check_attention(find_card(name), "flash_attention_2")
