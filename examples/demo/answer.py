"""Ask a patched checkpoint one question, loaded by stock transformers and by memopt: both must still know the answer.

    python examples/demo/answer.py out/SmolLM2-135M-Instruct

Exits with 1 when an answer is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import memopt

QUESTION = "The capital of France is"
EXPECTED = "Paris"


def main(folder: str) -> int:
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = {
        "stock transformers": complete(AutoModelForCausalLM.from_pretrained(folder), tokenizer),
        "memopt.load": complete(memopt.load(folder), tokenizer),
    }
    for loader, answer in answers.items():
        print(f"{loader:<20}{QUESTION!r} -> {answer!r}")
    wrong = [loader for loader, answer in answers.items() if EXPECTED not in answer]
    if wrong:
        print(f"No '{EXPECTED}' in the answer of the model loaded by {' and by '.join(wrong)}.", file=sys.stderr)
    return 1 if wrong else 0


def complete(model: Any, tokenizer: Any) -> str:
    """The eight most likely next tokens after `QUESTION`, greedily, as text."""
    inputs = tokenizer(QUESTION, return_tensors="pt")
    tokens = model.eval().generate(**inputs, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :]))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("Usage: python examples/demo/answer.py FOLDER, a folder that `memopt patch` wrote.")
    sys.exit(main(sys.argv[1]))
