"""A binary is compiled once for what it depends on, and again where any of that changed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.compiler import ASTSource

from tests.aot import binary_cache
from tests.aot.binary_cache import binary_key, source_key
from tools.kernels.aot import TARGETS, Binary, capture

SOURCE = """\
import triton
import triton.language as tl

FACTOR = tl.constexpr(2)


@triton.jit
def inner(x):
    return x * FACTOR


@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, inner(tl.load(x + offsets)))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(binary_cache.FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that were compiled for, in their order."""
    stock, seen = binary_cache.compile_now, []

    def counted(source, target, options):
        seen.append(str(target.arch))
        return stock(source, target, options)

    monkeypatch.setattr(binary_cache, "compile_now", counted)
    return seen


def module_of(text: str, path: Path) -> ModuleType:
    """`text` as a module: another object each time, as in another process."""
    path.write_text(text)  # Triton reads a kernel's source from its file
    module = sys.modules[path.stem] = ModuleType(path.stem)
    exec(compile(text, str(path), "exec"), vars(module))  # an import would trust bytecode of the same second
    return module


def compiled(text: str, folder: Path, target: str = "sm_90", dtype: torch.dtype = torch.float32) -> Binary:
    kernel = module_of(text, folder.parent / "kernels_of_test.py").kernel
    x = torch.empty(64, dtype=dtype, device="meta")
    with capture(target) as binaries:
        kernel[(1,)](x, x, BLOCK=64, num_warps=1, enable_fp_fusion=True)
    (binary,) = binaries
    return binary


def test_what_was_compiled_once_is_read_and_says_the_same(folder: Path, compilations: list[str]) -> None:
    for target in TARGETS:
        first, second = (compiled(SOURCE, folder, target) for _ in range(2))
        assert first == second
        assert (first.registers, first.spilled, first.widths) == (second.registers, second.spilled, second.widths)
        assert first.registers > 0
    assert len(compilations) == len(TARGETS)


def test_a_kernel_that_moved_down_its_file_is_not_compiled_again(folder: Path, compilations: list[str]) -> None:
    compiled(SOURCE, folder)
    compiled(SOURCE.replace("FACTOR =", "\n# A comment.\n\nFACTOR ="), folder)
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.load(x + offsets)", "tl.load(x + offsets) + 1"),
        ("return x * FACTOR", "return x + FACTOR"),
        ("tl.constexpr(2)", "tl.constexpr(3)"),
    ],
    ids=["the kernel", "a function it calls", "a constant that a function reads"],
)
def test_a_changed_source_is_compiled_again(old: str, new: str, folder: Path, compilations: list[str]) -> None:
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    before, after = compiled(SOURCE, folder), compiled(changed, folder)
    assert len(compilations) == 2
    assert before.asm["ptx"] != after.asm["ptx"]


def test_another_dtype_or_target_is_another_entry(folder: Path, compilations: list[str]) -> None:
    compiled(SOURCE, folder)
    compiled(SOURCE, folder, dtype=torch.bfloat16)
    compiled(SOURCE, folder, target="sm_80")
    assert len(compilations) == 3


def test_another_version_of_triton_is_another_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = module_of(SOURCE, tmp_path / "kernels_of_test.py").kernel
    source = ASTSource(kernel, {"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 64})
    now = binary_key(source, TARGETS["sm_90"], {})
    monkeypatch.setattr(binary_cache.triton, "__version__", "0.0.0")
    assert binary_key(source, TARGETS["sm_90"], {}) != now


def test_a_function_reached_through_a_module_counts(tmp_path: Path) -> None:
    of_kernel = SOURCE[SOURCE.index("@triton.jit\ndef kernel") :].replace("inner(", "inner_of_test.inner(")
    outer = f"import inner_of_test\nimport triton\nimport triton.language as tl\n\n{of_kernel}"

    def key(body: str) -> str:
        module_of(SOURCE.replace("x * FACTOR", body), tmp_path / "inner_of_test.py")
        return source_key(module_of(outer, tmp_path / "outer_of_test.py").kernel)

    assert key("x * FACTOR") == key("x * FACTOR")
    assert key("x * FACTOR") != key("x + FACTOR")


@pytest.mark.parametrize("damage", [b"", b"not compressed", None], ids=["empty", "foreign", "cut off"])
def test_a_damaged_entry_is_compiled_again(damage: bytes | None, folder: Path, compilations: list[str]) -> None:
    first = compiled(SOURCE, folder)
    (entry,) = (path for path in folder.rglob("*") if path.is_file())
    entry.write_bytes(entry.read_bytes()[:-20] if damage is None else damage)
    assert compiled(SOURCE, folder) == first
    assert len(compilations) == 2
    assert compiled(SOURCE, folder) == first
    assert len(compilations) == 2


def test_without_a_folder_nothing_is_written(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(binary_cache.FOLDER)
    compiled(SOURCE, folder)
    compiled(SOURCE, folder)
    assert len(compilations) == 2
    assert not folder.exists()
