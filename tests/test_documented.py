"""What the pages show is run: each `memopt` command, each block of Python, each option that a sentence names.

A page's commands run as they stand, in a folder where hub ids are folders of tiny models.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import tomllib
import torch
import typer
from transformers import AutoModelForCausalLM

import memopt
from memopt.cli.main import build_app, main
from memopt.plan.recipe import dump_recipe
from tests.factories import tiny_inputs, tiny_model
from tools.pages import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "examples/multi_gpu.md")),
]
#: Hub ids and placeholders of the pages.
MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-1.7B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B",
    "MODEL",
)
#: Folders that earlier commands of other pages have written.
PATCHED = "SmolLM2-135M-memopt"
#: Blocks of Python that need more than a CPU and the environment of the tests -> the tests that run the same.
ELSEWHERE = {
    "BitsAndBytesConfig": "tests/train/test_quantised.py",
    "fsdp_size=8": "tests/distributed/test_loading.py",
}
#: Pages whose blocks of Python are one program, or parts of a patch, which other tests run.
OTHER_TESTS = {"follow-a-tensor": "test_pages.py", "add-a-patch": "test_pages.py"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path, program: str = "memopt") -> list[str]:
    """Lines of the page's blocks that run `program`, without the comment behind them."""
    lines = (line for block in blocks(page, "console") for line in block.splitlines())
    found = (line.removeprefix("$ ").partition(" #")[0].strip() for line in lines if line.startswith("$ "))
    return [line for line in found if line.startswith(f"{program} ")]


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def having(found: Any) -> list[Any]:
    return [pytest.param(page, id=_id(page)) for page in PAGES if found(page)]


def in_order() -> list[Any]:
    """Pages with commands. A verification, even of a tiny model, takes ten seconds."""
    slow = {page for page in PAGES if any(line.startswith("memopt verify") for line in commands(page))}
    marks = {page: [pytest.mark.slow] for page in slow}
    return [pytest.param(page, id=_id(page), marks=marks.get(page, [])) for page in PAGES if commands(page)]


def mentioned(page: Path) -> Iterator[tuple[str, set[str]]]:
    """Commands of memopt in a page's code, and the options that stand behind them."""
    for text in re.findall(r"\bmemopt ((?:patch|verify|report|unpatch|recipes|doctor)\b[^`\n#]*)", page.read_text()):
        yield text.split()[0], set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, stock and patched, two adapters, and a batch."""
    root = tmp_path_factory.mktemp("shelf")
    model = tiny_model("llama")
    model.save_pretrained(root / "stock")
    memopt.patch_checkpoint(root / "stock", root / "patched")
    targets = ["q_proj", "down_proj"]
    for folder, base in (("my-lora", root / "stock"), ("my-lora-2", root / "patched")):
        adapted = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=targets))
        adapted.peft_config["default"].base_model_name_or_path = str(base)
        adapted.save_pretrained(root / folder)
    torch.save(dict(tiny_inputs("llama", 2, 16)), root / "batch.pt")
    return root


@pytest.fixture
def desk(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a reader who follows a page."""
    for name in MODELS:
        shutil.copytree(shelf / "stock", tmp_path / name)
    for name in ("my-lora", "my-lora-2"):
        shutil.copytree(shelf / name, tmp_path / name)
    shutil.copy(shelf / "batch.pt", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", in_order())
def test_the_commands_of_a_page_do_what_they_say(page: Path, desk: Path, shelf: Path) -> None:
    shutil.copytree(shelf / "patched", desk / PATCHED)
    for line in commands(page):
        if line.startswith("memopt patch") and "--adapter" not in line:
            shutil.rmtree(desk / PATCHED, ignore_errors=True)
        assert main(shlex.split(line)[1:]) == 0, line


@pytest.mark.parametrize("page", having(lambda page: page.stem not in OTHER_TESTS and blocks(page, "python")))
def test_the_python_of_a_page_runs(page: Path, desk: Path) -> None:
    model = tiny_model("llama")
    names: dict[str, Any] = {
        "memopt": memopt,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "processor": lambda *_, **__: tiny_inputs("llama", 2, 16),
    }
    (desk / "plan.yaml").write_text(dump_recipe(memopt.load_recipe("exact-levels")))
    for block in blocks(page, "python"):
        code = compile(block, page.name, "exec")
        if not any(name in block for name in ELSEWHERE):
            memopt.unpatch(names["model"])
            exec(code, names)


def test_tests_that_run_the_other_blocks_exist() -> None:
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())


@pytest.mark.parametrize("page", having(lambda page: list(mentioned(page))))
def test_options_of_a_page_exist(page: Path) -> None:
    parsers = typer.main.get_command(build_app()).commands
    for command, options in mentioned(page):
        known = {name for each in parsers[command].params for name in [*each.opts, *each.secondary_opts]}
        assert options <= known | {"--debug", "--no-color", "--help"}, f"{page.name}: memopt {command}"


@pytest.mark.parametrize("page", having(lambda page: "pip install -e" in page.read_text()))
def test_extras_that_a_page_installs_exist(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"pip install -e '\.\[([\w,]+)\]'", page.read_text())
    assert named
    assert {name for names in named for name in names.split(",")} <= extras.keys()


@pytest.mark.parametrize("page", having(lambda page: "make " in page.read_text()))
def test_targets_of_make_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = page.read_text()
    named = {
        name for line in re.findall(r"(?:`|^\$ |^)make ([^`\n#]*)", text, re.MULTILINE) for name in line.split()[:1]
    }
    for name in (name for name in named if re.fullmatch(r"[a-z-]+", name)):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"{page.name}: make {name}"


@pytest.mark.parametrize(
    "page", having(lambda page: re.search(r"python -m (benchmarks|tests|tools)", page.read_text()))
)
def test_modules_that_a_page_runs_exist_with_their_options(page: Path) -> None:
    for name, rest in re.findall(r"python -m ((?:benchmarks|tests|tools)[\w.]*)([^`\n#|]*)", page.read_text()):
        spec = _source(name)
        assert spec is not None, f"{page.name}: python -m {name}"
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest):
            assert f'"{option}"' in spec, f"{page.name}: python -m {name} {option}"


def _source(name: str) -> str | None:
    """The text of a module and of the package around it, in which its options stand."""
    from importlib.util import find_spec

    found = find_spec(name)
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    shared = [*(ROOT / "benchmarks").glob("*.py"), *folder.rglob("*.py")]
    return "\n".join(path.read_text() for path in shared)


@pytest.mark.parametrize("page", having(lambda page: [*commands(page, "torchrun"), *commands(page, "accelerate")]))
def test_files_that_launchers_start_exist(page: Path) -> None:
    lines = [line for program in ("torchrun", "accelerate", "deepspeed") for line in commands(page, program)]
    named = {word for line in lines for word in line.split() if "/" in word and not word.startswith("plan/")}
    assert [word for word in named if not (ROOT / word).is_file()] == []


def test_the_summary_of_the_quick_start_is_that_of_the_model(smollm2: Path) -> None:
    model = memopt.patch(AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16))
    (shown,) = blocks(ROOT / "docs" / "quick-start.md", "text")
    assert str(memopt.summary(model)) == shown.strip()
