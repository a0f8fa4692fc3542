"""The launch table: every size is covered, and a user's own table is used or refused with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.errors import LaunchTableError
from memopt.kernels.base import launch
from memopt.kernels.base.device import launches_emulated, runs_triton
from memopt.kernels.base.launch import LaunchConfig, launch_config, override, parse_table, read_table, warps_of
from memopt.kernels.norm.ops import forward
from memopt.kernels.norm.reference import NormArguments, NormSpec
from memopt.torch_compat import FakeTensorMode, TorchDispatchMode

KERNELS = [
    "norm_forward",
    "norm_affine",
    "norm_backward",
    "activation_forward",
    "activation_backward",
    "gated_forward",
    "gated_backward",
    "loss_forward",
    "loss_backward",
]
SIZES = [*range(1, 70), *(2**n + d for n in range(7, 21) for d in (-1, 0, 1))]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: A table that fits, for one kernel.
ENTRIES: dict[str, list[list[int | None]]] = {
    "16": [[64, 4, 64, 2], [None, 1, 2048, 4]],
    "32": [[None, 1, 1024, 8]],
}


def own_table(launches: Any) -> str:
    return json.dumps({"made": {"how": "by hand"}, "launches": launches})


@pytest.fixture
def table_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that MEMOPT_LAUNCH_TABLE names."""
    path = tmp_path / "own.json"
    path.write_text(own_table({"norm_affine": ENTRIES}))
    monkeypatch.setenv(launch.VARIABLE, str(path))
    monkeypatch.setattr(launch, "_table", launch._read_tables)
    launch_config.cache_clear()
    yield path
    launch_config.cache_clear()


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_size_from_one_up_has_a_configuration_of_powers_of_two(kernel: str, dtype: torch.dtype) -> None:
    for hidden in SIZES:
        config = launch_config(kernel, hidden, dtype)
        assert is_power_of_two(config.rows)
        assert is_power_of_two(config.block)
        assert is_power_of_two(config.num_warps)
        assert config.num_warps <= launch.MOST_WARPS
        assert config.rows * config.block <= launch.LARGEST_TILE


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_thread_has_at_least_one_vector_of_128_bits(kernel: str) -> None:
    for dtype in DTYPES:
        for hidden in SIZES:
            config = launch_config(kernel, hidden, dtype)
            assert config.rows * config.block * dtype.itemsize >= config.num_warps * 32 * 16


def test_the_shipped_table_has_no_other_kernel() -> None:
    assert sorted(launch._table()) == sorted(KERNELS)


def test_a_gpu_with_wider_warps_gets_as_many_threads() -> None:
    narrow = launch_config("activation_forward", 4096, torch.bfloat16)
    with warps_of(64):
        wide = launch_config("activation_forward", 4096, torch.bfloat16)
    assert wide.num_warps * 64 == narrow.num_warps * 32
    assert launch_config("activation_forward", 4096, torch.bfloat16) == narrow


def test_an_override_ends_with_its_block() -> None:
    before = launch_config("norm_affine", 4096, torch.bfloat16)
    config = LaunchConfig(2, 32, 1)
    with override("norm_affine", config):
        assert launch_config("norm_affine", 4096, torch.bfloat16) == config
    assert launch_config("norm_affine", 4096, torch.bfloat16) == before


def test_a_table_of_the_users_replaces_its_kernels_and_no_other(table_of_the_environment: Path) -> None:
    assert launch_config("norm_affine", 64, torch.bfloat16) == LaunchConfig(4, 64, 2)
    assert launch_config("norm_affine", 65, torch.float16) == LaunchConfig(1, 2048, 4)
    assert launch_config("norm_affine", 65, torch.float32) == LaunchConfig(1, 1024, 8)
    shipped = read_table(Path(launch.__file__).with_name("launch.json"))
    assert launch_config("norm_forward", 1, torch.float32) == shipped["norm_forward"]["32"][0].config


def test_a_table_for_a_kernel_that_memopt_has_not_is_refused(table_of_the_environment: Path) -> None:
    table_of_the_environment.write_text(own_table({"softmax": ENTRIES}))
    with pytest.raises(LaunchTableError, match="no kernel 'softmax'"):
        launch_config("norm_affine", 64, torch.bfloat16)


def test_a_table_that_is_not_there_is_an_error_that_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(LaunchTableError, match=r"none\.json cannot be read: No such file.*MEMOPT_LAUNCH_TABLE"):
        read_table(tmp_path / "none.json")


def test_a_table_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchTableError, match="not text"):
        read_table(path)


def changed(bits: str, entries: Any) -> dict[str, Any]:
    return {"norm_affine": {**ENTRIES, bits: entries}}


@pytest.mark.parametrize(
    ("launches", "reason"),
    [
        ({"norm_affine": {"16": ENTRIES["16"]}}, 'needs the keys "16" and "32"'),
        ({"norm_affine": {**ENTRIES, "64": []}}, 'needs the keys "16" and "32"'),
        (changed("16", []), "not a list of entries"),
        (changed("16", {}), "not a list of entries"),
        (changed("16", [[None, 1, 1024]]), "is not \\[up to, rows, block, warps\\]"),
        (changed("16", [[64, 1, 64, 1]]), "last entry must be for every size"),
        (changed("16", [[64, 1, 64, 1], [64, 1, 64, 1], [None, 1, 64, 1]]), "sizes must rise"),
        (changed("16", [[None, 1, 64, 1], [64, 1, 64, 1], [None, 1, 64, 1]]), "sizes must rise"),
        (changed("16", [["64", 1, 64, 1], [None, 1, 64, 1]]), "neither a size nor null"),
        (changed("16", [[True, 1, 64, 1], [None, 1, 64, 1]]), "neither a size nor null"),
        (changed("32", [[None, 3, 64, 1]]), "rows = 3 is not a power of two"),
        (changed("32", [[None, 1, 0, 1]]), "block = 0 is not a power of two"),
        (changed("32", [[None, 1, 64, 64]]), "warps = 64 is not a power of two up to 32"),
        (changed("32", [[None, 1, 64, 2.0]]), "warps = 2.0 is not a power of two"),
        (changed("32", [[None, 1024, 2048, 4]]), "more than 1048576 elements"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_with_the_file_and_the_reason(launches: Any, reason: str) -> None:
    with pytest.raises(LaunchTableError, match=reason) as error:
        parse_table(own_table(launches), "own.json")
    assert "own.json" in str(error.value)
    assert "tools.kernels.tune" in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"launches": []}'])
def test_text_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(LaunchTableError, match="does not fit"):
        parse_table(text, "own.json")


def test_looking_up_a_configuration_does_not_load_triton() -> None:
    code = (
        "import sys, torch\n"
        "from memopt.kernels.base.launch import launch_config\n"
        "launch_config('norm_forward', 64, torch.float32)\n"
        "assert not [name for name in sys.modules if name.endswith('_triton')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class _Results(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.dtypes.append(result.dtype)
        return result


def test_an_emulated_launch_allocates_what_the_kernels_write_and_nothing_else() -> None:
    pytest.importorskip("triton")
    bf16 = torch.bfloat16
    arguments = NormArguments(NormSpec("layer", 1e-5), bf16, bf16, bf16)
    with FakeTensorMode():
        x, weight = torch.empty(4, 8, dtype=bf16), torch.empty(8, dtype=bf16)
        with launches_emulated(), _Results() as seen:
            assert runs_triton(x, weight)
            assert not runs_triton(x, torch.empty(8, dtype=torch.float64))
            seen.dtypes.clear()
            forward(x, weight, None, arguments)
        assert not runs_triton(x, weight)
    assert sorted(map(str, seen.dtypes)) == ["torch.bfloat16"] * 2 + ["torch.float32"]  # y, x_hat, rstd
