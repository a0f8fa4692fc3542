"""Proofs that a patched checkpoint is still the same model; `verify` runs them, docs/verify.md explains them."""

from memopt.verify.run import verify
from memopt.verify.verdict import Check, Verdict

__all__ = ["Check", "Verdict", "verify"]
