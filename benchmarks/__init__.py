"""Scripts that measure, one command each: ``python -m benchmarks.NAME``, in whichever of the rooms NAME lies.

gpu/ times kernels and blocks on a device, papers/ repeats what papers report, cost/ counts bytes and examines models.
Here is what they share; what the tests use too lies in tests/.
"""

from pathlib import Path

# A room is a folder of this package's own path: benchmarks/cost/walk.py is the module benchmarks.walk.
__path__ += [str(Path(__file__).with_name(room)) for room in ("gpu", "papers", "cost")]
