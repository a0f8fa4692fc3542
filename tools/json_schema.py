"""The JSON Schema of what every command prints with ``--json``.

    python tools/json_schema.py            print it
    python tools/json_schema.py --check    exit 1 where docs/json-schema/memopt-1.json is another

A new key of a document is added here; tests hold every document that they see to this schema. Keys are only ever added
while `schema_version` stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from memopt.patches.checks import Check
from memopt.plan.plan import Entry
from memopt.trace.training import Checkpointing, Precision, Train

FILE = Path(__file__).parents[1] / "docs" / "json-schema" / "memopt-1.json"


class Part(BaseModel):
    """An object with these keys and no others."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Growing(BaseModel):
    """An object with these keys, and others that may be added."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class Error(Part):
    type: str
    message: str
    """What happened and where: one sentence."""
    hint: str | None
    """What to do next."""


class Document(Part):
    schema_version: Literal[1]
    tool: Literal["memopt"]
    version: str
    """Of memopt."""
    command: str | None
    """None where none was recognised."""
    status: Literal["pass", "fail", "inconclusive", "error"]
    error: Error | None


class Failure(Document):
    """Of any command that could not do its work: status ``error`` with exit code 2, ``fail`` with 1."""

    status: Literal["error", "fail"]
    error: Error


class Done(Document):
    error: None


class Source(Part):
    name: str
    path: str
    revision: str | None
    commit: str | None


class Weights(Part):
    files: int
    bytes: int
    tensors: int
    changed_tensors: int | None
    changed_bytes: int | None


class Patch(Done):
    command: Literal["patch"]
    dry_run: bool
    model: Source
    output: str
    recipe: dict[str, Any]
    counts: dict[str, dict[str, int]]
    """Kind of site -> action -> number of sites."""
    entries: list[Entry]
    """Every site, with what is done to it and why."""
    weights: Weights
    folds: list[dict[str, Any]] | None
    """As in memopt.json; None for a dry run."""
    emitted: list[str]
    """Files for training engines, those of ``--emit``."""
    notes: list[str]


class Verify(Done):
    command: Literal["verify"]
    model: str
    checks: list[Check]


class Unpatch(Done):
    command: Literal["unpatch"]
    model: str
    output: str
    norms: list[str]
    original: list[str]
    computed: list[str]
    kept: list[tuple[str, str]]
    """(norm, why) of those that keep their folded form."""
    notes: list[str]


class Fit(Part):
    form: Literal["folded", "stock"]
    base_model: str
    commit: str | None
    folds: str
    affines: str


class ConvertedAdapter(Done):
    """Of ``--adapter``."""

    command: Literal["patch", "unpatch"]
    model: str
    adapter: str
    output: str
    fits: Fit
    """The model that the written adapter fits, with digests of its folds and of the stock norms."""
    base: str
    """What its config names as its base model."""
    changed: list[str]
    tensors: int
    notes: list[str]


class RecipeSummary(Part):
    name: str
    description: str


class Recipes(Done):
    command: Literal["recipes"]
    recipes: list[RecipeSummary]


class OneRecipe(Done):
    command: Literal["recipes"]
    recipe: dict[str, Any]


class Doctor(Done):
    command: Literal["doctor"]
    python: str
    packages: dict[str, str | None] = Field(description="Distribution -> its version; null if it is not installed.")
    device: str
    off: list[str] = Field(description="What does not run here, each with its reason.")


class Model(Part):
    id: str
    class_name: str = Field(alias="class")


class Training(Growing):
    batch: int
    seq: int | None
    precision: Precision
    train: Train
    lora_rank: int
    lora_targets: list[str]
    checkpointing: Checkpointing
    dropout: bool
    cuda_kernels: bool
    adapter_fp32: bool


class Account(Part):
    total: int
    """Bytes that live until backward."""
    unseen: int
    """Those of them that hooks on saved tensors do not see."""
    per_block: dict[str, int]
    per_cause: dict[str, int]


class Size(Part):
    bytes: int
    tensors: int


class Row(Part):
    cause: str
    dtype: str
    shape: list[int]
    before: Size
    after: Size


class BlockKind(Part):
    """Blocks that save the same; bytes of one of them."""

    blocks: list[str]
    before: int
    after: int
    rows: list[Row]


class ModelPart(Part):
    part: str
    before: int
    after: int


class Summary(Part):
    before: int
    after: int
    change: float


class Step(Part):
    after_forward: int
    peak: int
    peak_in: str
    per_kind: dict[str, int]
    per_module: dict[str, int]
    most_of_kind: dict[str, int]


class Steps(Part):
    before: Step | None
    after: Step | None


class Report(Done):
    """All sizes are bytes; ``before`` is the stock model, ``after`` the patched one."""

    model_config = ConfigDict(extra="allow")

    command: Literal["report"]
    model: Model
    recipe: str
    training: Training
    inputs: dict[str, Any] | None
    """Form of the given batch; None where one was made."""
    unit_bytes: int
    """The hidden state of all tokens in the compute dtype; 0 if no block was seen."""
    before: Account
    after: Account
    block_kinds: list[BlockKind]
    outside_blocks: list[Row]
    parts: list[ModelPart]
    summary: Summary
    step: Steps
    sampling: dict[str, Any] | None
    """The noise of sampled gradients; None unless the recipe samples."""
    headline: dict[str, Any] | None = None
    """With ``--gpu``: the card, each way to train with its peak, cost and largest batch, and the next remedy."""
    notes: list[str]


class Prediction(Done):
    """What `memopt report` prints instead where a device, a budget or the frontier is asked for."""

    model_config = ConfigDict(extra="allow")
    command: Literal["report"]
    block_kinds: None = None
    """Not in it."""
    written: list[str] | None = None
    """Files that --out and --emit wrote; not where only a device is asked for."""


DOCUMENT: TypeAdapter[Any] = TypeAdapter(
    Patch | Verify | Report | Prediction | Unpatch | ConvertedAdapter | Recipes | OneRecipe | Doctor | Failure
)


def validate(text: str) -> None:
    """Check the document `text`.

    Raises:
        pydantic.ValidationError: it does not fit the schema.
    """
    DOCUMENT.validate_json(text, strict=True)


def schema() -> str:
    """The schema as text."""
    found = DOCUMENT.json_schema(by_alias=True)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "What memopt prints with --json"}
    return json.dumps(head | found, indent=1) + "\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        same = FILE.is_file() and FILE.read_text() == schema()
        print("The schema is that of the code." if same else f"Write it anew: python tools/json_schema.py > {FILE}")
        return 0 if same else 1
    print(schema(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
