"""`hf memopt`: memopt as an extension of Hugging Face's command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]


def test_hf_runs_the_console_script_of_an_installed_extension(tmp_path: Path) -> None:
    """... with its arguments and its exit code; `hf extensions install` lays the same folder."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["hf-memopt"].partition(":")
    folder = tmp_path / ".local/share/hf/extensions/hf-memopt"
    folder.mkdir(parents=True)
    executable = folder / "hf-memopt"
    executable.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
    executable.chmod(0o755)
    manifest = {
        "owner": "memopt",
        "repo": "hf-memopt",
        "repo_id": "memopt/hf-memopt",
        "short_name": "memopt",
        "executable_path": str(executable),
        "type": "python",
        "installed_at": "2026-01-01T00:00:00+00:00",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }

    def hf(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "huggingface_hub.cli.hf", "memopt", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    listed = hf("recipes", "--json")
    assert listed.returncode == 0, listed.stderr
    assert "exact-unfolded" in listed.stdout
    assert json.loads(listed.stdout)["schema_version"]
    assert hf("recipes", "no-such-recipe").returncode == 2
