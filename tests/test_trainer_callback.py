"""The memory of gradients under `transformers.Trainer`."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Subset
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments, default_data_collator

import memopt
from memopt.errors import InputsError, ModelError
from memopt.patches.sampled_linear.visits import visits_of
from memopt.sampling import INDEX, GradientMemoryCallback, IndexedDataset
from tests.factories import tiny_model

SAMPLES, LENGTH = 10, 12


class Samples:
    """Token ids of several lengths; `words` is a column that no model takes."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __len__(self) -> int:
        return SAMPLES

    def tokens(self, index: int) -> int:
        return 4 + index % (LENGTH - 3)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens(index)
        padding = 0 if self.length is None else self.length - tokens
        ids = torch.randint(3, 67, (tokens,), generator=torch.Generator().manual_seed(index)).tolist()
        return {
            "input_ids": ids + [0] * padding,
            "attention_mask": [1] * tokens + [0] * padding,
            "labels": index % 3,
            "words": "not for the model",
        }


class Tokenizer:
    """What `DataCollatorWithPadding` needs of one."""

    def __init__(self, side: str) -> None:
        self.side, self.deprecation_warnings = side, {}  # type: ignore[var-annotated]

    def pad(self, features: list[dict[str, Any]], **kwargs: Any) -> dict[str, torch.Tensor]:
        longest = max(len(feature["input_ids"]) for feature in features)
        batch: dict[str, list[Any]] = {name: [] for name in features[0]}
        for feature in features:
            for name, value in feature.items():
                padding = [0] * (longest - len(value)) if isinstance(value, list) else []
                batch[name].append(
                    (padding + value if self.side == "left" else value + padding) if isinstance(value, list) else value
                )
        return {name: torch.tensor(values) for name, values in batch.items()}


class Watch(TrainerCallback):
    """Looks at the table before it is let go."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.after_epochs: list[torch.Tensor] = []
        self.text = ""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.callback.memory.flush()
        self.text = str(self.callback.memory)
        self.after_epochs.append(self.callback.memory._table.clone())


def trainer(tmp_path: Path, model: Any, data: Any, callback: Any, collator: Any = None, **settings: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **{"num_train_epochs": 2, "per_device_train_batch_size": 3} | settings,
    )
    return Trainer(model, arguments, collator, data, eval_dataset=data, callbacks=[callback])


def sampled_bert() -> Any:
    return memopt.patch(tiny_model("bert"), "sampled")


COLLATORS = {
    "default": default_data_collator,
    "right": DataCollatorWithPadding(Tokenizer("right")),  # type: ignore[arg-type]
    "left": DataCollatorWithPadding(Tokenizer("left")),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    ("collator", "settings"),
    [
        ("right", {"dataloader_num_workers": 2}),
        ("left", {"gradient_accumulation_steps": 2, "bf16": True}),
        ("default", {"eval_strategy": "steps", "eval_steps": 1}),
    ],
)
def test_two_epochs_remember_every_real_token(
    tmp_path: Path, collator: str, settings: dict[str, Any], caplog: Any
) -> None:
    samples = Samples(LENGTH if collator == "default" else None)
    callback = GradientMemoryCallback()
    model, watch = sampled_bert(), Watch(callback)
    run = trainer(tmp_path, model, IndexedDataset(samples), callback, COLLATORS[collator], **settings)
    run.add_callback(watch)
    with caplog.at_level(logging.INFO, "memopt"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="No gradients are remembered")
        run.train()
    real = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    for index in range(SAMPLES):
        real[index, : samples.tokens(index)] = True
    first, last = watch.after_epochs
    assert first.shape == (SAMPLES, LENGTH, len(visits_of(model)[0].padding))
    for table in (first, last):
        assert torch.equal(table.float().sum(-1) > 0, real)
    assert not torch.equal(first, last)
    assert watch.text in caplog.text
    assert callback.memory is None
    assert not visits_of(model)[0].memory.is_kept  # type: ignore[union-attr]


@pytest.mark.parametrize("adapters", ["before", "after"])
def test_under_peft(tmp_path: Path, adapters: str) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["query"], modules_to_save=["output.dense"])
    if adapters == "before":
        model = memopt.patch(get_peft_model(tiny_model("bert"), config), "sampled")
    else:
        model = get_peft_model(sampled_bert(), config)
    callback = GradientMemoryCallback(LENGTH)
    watch = Watch(callback)
    run = trainer(tmp_path, model, IndexedDataset(Samples(LENGTH)), callback, num_train_epochs=1)
    run.add_callback(watch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="No gradients are remembered")
        run.train()
    assert watch.after_epochs[0].any(-1).any(1).all()


def test_a_part_of_an_indexed_data_set_will_do(tmp_path: Path) -> None:
    callback = GradientMemoryCallback()
    watch = Watch(callback)
    data = Subset(IndexedDataset(Samples(LENGTH)), [1, 7])
    run = trainer(tmp_path, sampled_bert(), data, callback, num_train_epochs=1)
    run.add_callback(watch)
    run.train()
    assert watch.after_epochs[0].any(-1).any(1).nonzero().flatten().tolist() == [1, 7]


def without_index(features: list[dict[str, Any]]) -> dict[str, Any]:
    return default_data_collator([{k: v for k, v in feature.items() if k != INDEX} for feature in features])


def test_a_collator_that_drops_the_index_is_named(tmp_path: Path) -> None:
    run = trainer(tmp_path, sampled_bert(), IndexedDataset(Samples(LENGTH)), GradientMemoryCallback(), without_index)
    with pytest.warns(UserWarning, match=r"batches came without 'memopt_index'.*collator") as seen:
        run.train()
    assert sum("remembered" in str(warning.message) for warning in seen) == 1


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from (Samples(LENGTH)[index] for index in range(SAMPLES))


class Nameless(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": torch.zeros(3, 2, 2)}


def test_what_cannot_be_remembered_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def train(model: Any, data: Any) -> None:
        trainer(tmp_path, model, data, GradientMemoryCallback(), max_steps=1).train()

    with pytest.raises(InputsError, match=r"\(Samples\) does not number its samples.*IndexedDataset"):
        train(sampled_bert(), Samples(LENGTH))
    with pytest.raises(InputsError, match="is a stream"):
        train(sampled_bert(), Stream())
    with pytest.raises(InputsError, match=r"max_tokens=\.\.\."):
        train(sampled_bert(), IndexedDataset(Nameless()))
    for model in (tiny_model("bert"), memopt.patch(tiny_model("bert"))):
        with pytest.raises(ModelError, match="No linear of the model is sampled"):
            train(model, IndexedDataset(Samples(LENGTH)))
