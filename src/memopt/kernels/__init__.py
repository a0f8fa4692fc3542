"""Operators that save little for backward, a folder each: formula, reference, autograd, Triton kernels.

They do not depend on models, sites or recipes.
"""
