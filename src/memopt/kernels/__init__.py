"""Operators that keep little for backward. One file an operator: formula, reference, autograd.

Imports torch and the rule registry of `memopt.saved`; knows nothing of models, sites or recipes.
"""
