"""The faults that `tests.mutations` plants in a copy of the sources, by rooms of the tests that must notice them."""

from __future__ import annotations

from tests.mutation.fault import Fault
from tests.mutation.faults_elsewhere import ELSEWHERE
from tests.mutation.faults_in_kernels import KERNELS
from tests.mutation.faults_in_patches import PATCHES

FAULTS: tuple[Fault, ...] = (*KERNELS, *PATCHES, *ELSEWHERE)
