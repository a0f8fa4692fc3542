"""Proofs that a patched checkpoint is still the same model; `run.verify` runs them, docs/verify.md explains them."""
