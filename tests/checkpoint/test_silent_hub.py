"""A hub that is silent, refuses connections, or is slow: a local server in place of the real one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from memopt.environment.hub import PATIENCE

COMMIT = "0" * 40
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"\x02\x00\x00\x00\x00\x00\x00\x00{}"}
#: Without transformers, so that a process costs little.
LOCATE = "from memopt.checkpoint.sources.hub import locate; print(locate('some/model'))"
COMMAND = "from memopt.cli.main import run; run()"


class Mirror(BaseHTTPRequestHandler):
    """Answers every request for `some/model` a second late."""

    def do_GET(self) -> None:
        time.sleep(1)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/some/model/tree/"):
            found = [{"type": "file", "path": name, "size": len(body), "oid": "0"} for name, body in FILES.items()]
            body = json.dumps(found).encode()
        elif path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode()
        else:
            body = FILES.get(path.rpartition("/")[2], b"")
        self.send_response(200 if body else 404)
        self.send_header("ETag", f'"{len(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def refusing() -> Iterator[int]:
    with silent() as port:
        pass
    yield port


@contextlib.contextmanager
def mirror() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def start(code: str, arguments: list[str], port: int, home: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def spoken(process: subprocess.Popen[str]) -> Iterator[str]:
    """Lines of stderr, without those that tell the time."""
    assert process.stderr is not None
    return (line for line in process.stderr if not line.endswith(" s so far\n"))


@pytest.mark.rotates(4)
def test_a_silent_hub_is_given_up_in_one_sentence(tmp_path: Path) -> None:
    with silent() as port:
        process = start(COMMAND, ["report", "some/model"], port, tmp_path)
        lines = spoken(process)
        assert next(lines) == f"note: contacting the hub at http://127.0.0.1:{port}\n"
        asked = time.monotonic()
        told = [next(lines), next(lines)]
        given_up = time.monotonic()
        assert list(lines) == []
        process.communicate()
    assert process.returncode == 2
    assert told[1].startswith("error: 'some/model' is no local folder")
    assert "does not answer" in told[1]
    assert given_up - asked < PATIENCE + 5


def test_a_hub_that_refuses_connections_is_given_up_at_once(tmp_path: Path) -> None:
    with refusing() as port:
        process = start(LOCATE, [], port, tmp_path)
        _, errors = process.communicate(timeout=60)
    assert "does not answer. Check the network" in errors


@pytest.mark.rotates(4)
def test_a_slow_mirror_is_waited_for(tmp_path: Path) -> None:
    with mirror() as port:
        process = start(LOCATE, [], port, tmp_path)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert {path.name: path.read_bytes() for path in Path(output.strip()).iterdir()} == FILES
    with silent() as port:  # what is in the cache can still be used
        process = start(LOCATE, [], port, tmp_path)
        assert process.communicate(timeout=60)[0] == output


def test_control_c_ends_the_wait_at_once(tmp_path: Path) -> None:
    # A process that was started in the background ignores the signal.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heeds}; import logging; logging.basicConfig(level='INFO'); {LOCATE}"
    with silent() as port:
        process = start(code, [], port, tmp_path)
        assert process.stderr is not None
        while "contacting" not in process.stderr.readline():
            pass
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate()[1]
    assert time.monotonic() - begun < PATIENCE / 2
