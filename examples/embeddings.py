"""An embedding model learns from pairs: MiniLM-L6 with sentence-transformers, on sentences of film reviews.

python examples/embeddings.py [--steps N]
"""

from __future__ import annotations

import torch
from data import pretrained, reviews, show, steps
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import memopt


def main(count: int) -> None:
    torch.manual_seed(0)
    body = Transformer(pretrained("all-MiniLM-L6-v2"))
    model = SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension())])
    halves = [text.split() for text, _ in reviews()[: 16 * count]]
    pairs = {"first": [" ".join(words[::2]) for words in halves], "second": [" ".join(words[1::2]) for words in halves]}
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            "out/embeddings",
            max_steps=count,
            per_device_train_batch_size=16,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict(pairs),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[memopt.TrainerCallback()],  # the one line
    )
    trainer.train()
    show([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], memopt.summary(model))


if __name__ == "__main__":
    main(steps(40))
