"""Proofs that a patched checkpoint is still the same model; `verify` runs them, docs/verify.md explains them."""

from memopt.verdict import Check, Verdict
from memopt.verify.run import verify

__all__ = ["Check", "Verdict", "verify"]
