"""Shared parts of the commands: streams, the JSON document, progress, and exit codes of errors.

stdout carries the result alone; notes, progress and errors go to stderr. Only the standard library and typer are
imported at the top, so that `memopt --help` is fast.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memopt
from memopt.environment.files import format_bytes
from memopt.errors import MemoptError, StreamError, printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def optional(help: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
    """An option whose default is not in the help."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, **more)


InputsOption = Annotated[
    Path | None,
    optional("A batch (.pt or .safetensors: arguments of the model's forward), if memopt cannot guess inputs.", "FILE"),
]
RevisionOption = Annotated[str | None, optional("Branch, tag or commit on the hub.", "REVISION")]
AgainstOption = Annotated[str | None, optional("The original, if it is not at the place in memopt.json.", "MODEL")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python files that come with the model.")
]  # fmt: skip
EmitOption = Annotated[
    list[str] | None,
    optional(
        "Also write its configuration: trainer, accelerate, deepspeed, fsdp, axolotl, torchtitan; repeatable.", "ENGINE"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
SCHEMA_VERSION = 1
EXIT_OK, EXIT_NEGATIVE, EXIT_ERROR = 0, 1, 2
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141
_PATIENCE, _PLAIN_INTERVAL = 2.0, 10.0
_ERASE_LINE = "\x1b[2K"
#: One write: cursor movements, a text, and a carriage return.
_DRAWN = re.compile(r"((?:\r|\n|\x1b\[(?:2K|K|A))*)(.*?)(\r?)", re.DOTALL)


def document(command: str | None, status: str, **fields: Any) -> dict[str, Any]:
    """The JSON document of `command` (None: none was recognised), which ended in `status`, with its own `fields`."""
    head = {"schema_version": SCHEMA_VERSION, "tool": "memopt", "version": memopt.__version__}
    return {**head, "command": command, "status": status, **fields, "error": fields.get("error")}


def print_json(value: dict[str, Any]) -> None:
    """Print the one JSON document of a run."""
    print(as_json(value))


def as_json(value: dict[str, Any]) -> str:
    """`value` as JSON: NaN and infinity become null, lone surrogates '?'; control characters are escaped."""
    content = json.dumps(value, default=str, ensure_ascii=False).encode("utf-8", "replace")
    finite = json.loads(content, parse_constant=lambda _: None)
    text = json.dumps(finite, indent=2, ensure_ascii=False)
    return text if text.replace("\n", "").isprintable() else json.dumps(finite, indent=2)


def print_rich(*renderables: RenderableType) -> None:
    """Print tables and the like as part of the result: 80 columns and no colour off a terminal."""
    from memopt.reporting.text import Terminal

    console = Terminal()
    for renderable in renderables:
        console.print(renderable)


def say(*lines: str) -> None:
    """Print lines of the result, with control characters of terminals escaped, line breaks too."""
    print(*map(printable, lines), sep="\n")


def quoted(path: object) -> str:
    """A path for a command line that a shell reads, in characters that a terminal shows."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    shown = (
        c if c.isprintable() and c not in "\\'" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(c)) for c in text
    )
    return f"$'{''.join(shown)}'"


class Checked:
    """A stdout whose failed writes raise a `StreamError` with the reason; a closed pipe stays a BrokenPipeError.

    Control characters of terminals are escaped, except line breaks, tabs and the sequences around a text that redraw
    its line: libraries print names from untrusted files without escaping them.
    """

    def __init__(self, stream: Any, escapes: bool = True) -> None:
        self._stream, self._escapes = stream, escapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def unescaped(self) -> Checked:
        """The stream without escaping, for text that is already escaped."""
        return type(self)(getattr(self._stream, "unescaped", self._stream), escapes=False)

    def write(self, text: str) -> Any:
        with _as_stream_error():
            return self._write(text)

    def _write(self, text: str) -> Any:
        if self._escapes and (found := _DRAWN.fullmatch(text)):
            text = found[1] + printable(found[2], "\n\t") + found[3]
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:  # the terminal's encoding lacks a character
            return self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def flush(self) -> None:
        with _as_stream_error():
            self._stream.flush()


class Forgiving(Checked):
    """A stderr that ignores failed writes: notes and errors are lost, but the work and the exit code are not."""

    def write(self, text: str) -> Any:
        with contextlib.suppress(OSError):
            return self._write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def _as_stream_error() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"The result cannot be written to stdout: {error.strerror}."
        raise StreamError(message, "Redirect it to another place and run the command again.") from error


@contextlib.contextmanager
def result(outcome: str) -> Iterator[None]:
    """Context for printing a result. If printing fails or is interrupted, `outcome` tells the work that is done."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        note(outcome)
        raise
    except StreamError as error:
        raise StreamError(error.message, outcome) from error


def recipe_names(incomplete: str) -> list[str]:
    """Completions of the name of a recipe."""
    from memopt.plan.shipped import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


def note(text: str) -> None:
    """Print a line on stderr."""
    print(_ERASE_LINE * _draws() + printable(text), file=sys.stderr, flush=True)


def _draws() -> bool:
    """Whether stderr is a terminal on which a line can be drawn again."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"note: {record.getMessage()}")


@contextlib.contextmanager
def notes_shown() -> Iterator[None]:
    """Inside, memopt's log messages (e.g. that it waits for the hub) go to stderr."""
    logger, notes = logging.getLogger("memopt"), _Notes()
    level = logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)


def only_results_on_stdout() -> contextlib.AbstractContextManager[Any]:
    """Inside, prints go to stderr, such as those of libraries."""
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Inside, the garbage collector is off, and it skips the objects created here later, too: modules live forever."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def waiting(what: object) -> Iterator[Callable[[], None]]:
    """Inside, after two seconds, stderr shows the current text of `what` and the time that has passed; the callback
    ends this earlier."""
    done = threading.Event()
    thread = threading.Thread(target=_tell_time, args=(what, done), daemon=True)

    def end() -> None:
        done.set()
        thread.join()

    thread.start()
    try:
        yield end
    finally:
        end()


def _tell_time(what: object, done: threading.Event) -> None:
    started, draws, pause = time.monotonic(), _draws(), _PATIENCE
    while not done.wait(pause):
        pause = 1.0 if draws else _PLAIN_INTERVAL
        text = f"{what}: {time.monotonic() - started:.0f} s so far"
        # The carriage return lets the next print replace the line.
        print(f"{_ERASE_LINE}{text}\r" if draws else f"{text}\n", end="", file=sys.stderr, flush=True)
        if done.is_set():
            break
    if draws:
        print(_ERASE_LINE, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback (bytes done, bytes to do): a bar on a terminal, else a plain line every ten seconds. Before its first
    call it prints the time, like `waiting`."""
    with waiting("Reading the model") as begin, _bar(label) as update:

        def tell(done: int, total: int) -> None:
            begin()
            update(done, total)

        yield tell


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None]]:
    if not sys.stderr.isatty():
        yield _plain_progress(label)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from memopt.reporting.text import Terminal

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    bar = Progress(*columns, console=Terminal(sys.stderr), transient=True)
    task = bar.add_task(label, total=None)
    with contextlib.ExitStack() as stack:

        def update(done: int, total: int) -> None:
            if not bar.live.is_started:
                stack.enter_context(bar)
            bar.update(task, completed=done, total=total)

        yield update


def output_file(path: Path | None, option: str, *, force: bool) -> Path | None:
    """The path of the option's result, checked before any work as `check_output` does."""
    if path is None:
        return None
    from memopt.environment.files import check_output

    return check_output(path, option, force=force)


def report_error(error: BaseException, *, command: str | None, as_json: bool, debug: bool) -> int:
    """Print an error as one line on stderr (and as the JSON document); returns the exit code."""
    kind, message, hint, code = _describe(error)
    if debug and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    line = f"error: {message}" + (f" {hint}" if hint else "")
    note(" ".join(line.split()))
    if as_json:
        status = "fail" if code == EXIT_NEGATIVE else "error"
        print_json(document(command, status, error={"type": kind, "message": message, "hint": hint}))
    return code


def plural(count: int, noun: str) -> str:
    """``1 norm``, ``2 norms``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _describe(error: BaseException) -> tuple[str, str, str | None, int]:
    """(type, message, hint, exit code)."""
    if isinstance(error, MemoptError):
        return type(error).__name__, error.message, error.hint, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted", "Interrupted.", None, EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_ERROR
        return "Terminated", "Terminated.", None, code
    if isinstance(error, OSError) and error.strerror:  # from the operating system, e.g. a path that is too long
        at = f"'{str(error.filename)[:200]}'" if error.filename else "A file"
        return type(error).__name__, f"{at} cannot be used: {error.strerror}.", None, EXIT_ERROR
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    hint = "Run it again with --debug for the traceback."
    return "InternalError", f"memopt failed: {message.rstrip('.')}.", hint, EXIT_ERROR


def _plain_progress(label: str) -> Callable[[int, int], None]:
    last: float | None = None

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        last = now if last is None else last
        if now - last >= _PLAIN_INTERVAL:
            last = now
            note(f"{label}: {100 * done // max(total, 1)} % of {format_bytes(total)}")

    return tell
