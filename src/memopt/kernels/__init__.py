"""Operators that save little for backward, a folder each: formula, reference, autograd, Triton kernels.

They know nothing of models, sites or recipes.
"""
