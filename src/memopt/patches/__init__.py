"""Rewrites of a live module: one file a rewrite, all instance-level and reversible.

`apply` carries a plan out and undoes it; `swap` is how a module gets another forward without losing anything.
"""
