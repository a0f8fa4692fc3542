"""Operators that keep little for backward. One file an operator: formula, reference, autograd.

Imports torch (and triton) only; knows nothing of models, sites or recipes.
"""
