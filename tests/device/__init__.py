"""Tests on a CUDA device that is emulated on the CPU (`emulator/`): `make test-device`.

numeric/ compares values and gradients, with kernels in Triton's interpreter; counted/ counts launches,
synchronisations and bytes, with launches left out. quantised/ needs the libraries of `make test-train`.
"""
