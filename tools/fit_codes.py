"""Fits the codes of known activations: src/memopt/kernels/derivative_codes/codes.json.

python tools/fit_codes.py            write codes.json
python tools/fit_codes.py --check    exit 1 where codes.json differs from the fit
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from memopt.kernels.derivative_codes.fit import DECIMALS, KINDS, fit, step_error
from memopt.kernels.derivative_codes.schemes import PUBLISHED, SCHEMES, published_code
from memopt.torch_compat.activations import ACTIVATIONS

SHIPPED = Path(str(resources.files("memopt.kernels.derivative_codes").joinpath("codes.json")))
TOLERANCE = 1e-9


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where codes.json differs")
    arguments = parser.parse_args(argv)
    codes = {kind: {scheme: _entry(kind, scheme) for scheme in _schemes_of(kind)} for kind in KINDS}
    if not arguments.check:
        SHIPPED.write_text(_document(codes))
        return 0
    lines = list(differences(json.loads(SHIPPED.read_text())["codes"], codes))
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


def differences(shipped: Any, found: Any, where: str = "codes.json") -> Iterator[str]:
    """One sentence for everything in which two documents differ by more than 1e-9."""
    if isinstance(found, dict) and isinstance(shipped, dict) and found.keys() == shipped.keys():
        for key, value in found.items():
            yield from differences(shipped[key], value, f"{where}, {key}")
    elif isinstance(found, list) and isinstance(shipped, list) and len(found) == len(shipped):
        for i, value in enumerate(found):
            yield from differences(shipped[i], value, f"{where}[{i}]")
    elif not (isinstance(found, float) and isinstance(shipped, float) and abs(found - shipped) <= TOLERANCE):
        yield f"{where}: {shipped!r} is there, {found!r} is found."


def _schemes_of(kind: str) -> tuple[str, ...]:
    return SCHEMES if kind in PUBLISHED else SCHEMES[1:]


def _entry(kind: str, scheme: str) -> dict[str, Any]:
    if scheme != "published":
        return fit(ACTIVATIONS[kind].value, scheme)
    code = published_code(kind)
    return {"error": round(step_error(ACTIVATIONS[kind].value, list(code.thresholds), list(code.levels)), DECIMALS)}


def _document(codes: dict[str, dict[str, Any]]) -> str:
    """JSON with one code a line."""
    kinds = []
    for kind, schemes in codes.items():
        lines = ",\n".join(f"      {json.dumps(scheme)}: {json.dumps(entry)}" for scheme, entry in schemes.items())
        kinds.append(f"    {json.dumps(kind)}: {{\n{lines}\n    }}")
    made = json.dumps({"made": "python tools/fit_codes.py"})[1:-1]
    return f'{{\n  {made},\n  "codes": {{\n' + ",\n".join(kinds) + "\n  }\n}\n"


if __name__ == "__main__":
    raise SystemExit(main())
