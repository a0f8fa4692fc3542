"""The `memopt` command: its sub-commands, the global options, and the exit code of every error.

A sub-command is a typer function in a module of its name. It returns its exit code, and does slow imports inside.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Any, cast

import typer

import memopt
from memopt.cli import common
from memopt.environment.garbage import collect_seldom
from memopt.errors import StreamError, UsageError

_HELP = "Patch Hugging Face models to fine-tune them in less memory, and prove that they stay the same."
#: Environment variable that a shell sets to get completions; other variables hold the command line.
_COMPLETION = "_MEMOPT_COMPLETE"
COMMANDS = ("patch", "verify", "report", "unpatch", "recipes", "doctor")
#: Seconds until an interrupt that could not be handled comes again.
_MOMENT = 0.02
#: Type of a parser's error -> what it says of the value, and of the limit.
_FAULTS = {
    "int_parsing": "'{}' is not a whole number",
    "float_parsing": "'{}' is not a number",
    "greater_than_equal": "{} is less than {:g}",
    "less_than_equal": "{} is more than {:g}",
}
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run() -> None:
    """Entry point of the console script."""
    collect_seldom()  # else a sixth of the import time is collections that find nothing
    # If stderr is closed, sys.stderr is None, and print(file=None) writes to stdout.
    stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = cast(Any, common.Forgiving(stderr))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else SIGINT is ignored, as in the background
        process = os.getpid()
        for each in (signal.SIGINT, signal.SIGALRM):
            signal.signal(each, lambda _, frame: _interrupt(frame, process))
    codes: list[int] = []
    # Runs after all handlers that are registered later, and ends the process without Python's slow freeing of objects.
    atexit.register(lambda: _leave(*codes))
    codes.append(main(sys.argv[1:]))
    if codes == [common.EXIT_INTERRUPTED]:
        os._exit(common.EXIT_INTERRUPTED)  # else Python waits for the threads of a download
    sys.exit(codes[0])


def _interrupt(frame: FrameType | None, process: int) -> None:
    """Handle Ctrl-C. During an import, end the process at once: libraries catch all exceptions of their imports. Python
    ignores an exception in a `__del__`, and refuses a write inside a write to the same stream; there the signal comes
    again a moment later."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        if frame.f_code.co_name == "__del__":
            signal.setitimer(signal.ITIMER_REAL, _MOMENT)
            return
        frame = frame.f_back
    if frame is None or os.getpid() != process:
        raise KeyboardInterrupt
    command = next((word for word in sys.argv[1:] if word in COMMANDS), None)
    try:
        with contextlib.redirect_stdout(sys.__stdout__):
            _leave(common.report_error(KeyboardInterrupt(), command=command, as_json="--json" in sys.argv, debug=False))
    except RuntimeError:
        signal.setitimer(signal.ITIMER_REAL, _MOMENT)


def _leave(code: int | None = None) -> None:
    """End the process with `code`; None: do nothing, because an exception is ending the process."""
    if code is not None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # None, full or closed
                stream.flush()
        os._exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run the command line `arguments`; returns the exit code."""
    rest, debug = _take_globals(arguments)
    as_json = "--json" in rest
    command = next((word for word in rest if word in COMMANDS), None)
    stdout: Any = sys.stdout
    if stdout is None:
        error = StreamError(
            "stdout is closed, so memopt cannot print a result; it did nothing.", "Run the command with an open stdout."
        )
        return common.report_error(error, command=command, as_json=False, debug=debug)
    completing = contextlib.redirect_stderr(io.StringIO()) if _COMPLETION in os.environ else contextlib.nullcontext()
    try:
        stdout_checked, stderr_escaped = common.Checked(stdout), common.Forgiving(sys.stderr)
        with (
            contextlib.redirect_stdout(cast(Any, stdout_checked)),
            contextlib.redirect_stderr(cast(Any, stderr_escaped)),
            common.notes_shown(),
            completing,
        ):
            code = _run(rest, command, as_json=as_json, debug=debug)
            sys.stdout.flush()
    except (BrokenPipeError, StreamError) as error:
        # Python flushes stdout again at exit; this discards the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        if isinstance(error, BrokenPipeError):  # nobody reads it any more
            return common.EXIT_BROKEN_PIPE
        return common.report_error(error, command=command, as_json=False, debug=debug)
    return code


def build_app() -> typer.Typer:
    """The typer application with all commands."""
    app = typer.Typer(
        help=_HELP,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_globals)
    for name in COMMANDS:
        function = getattr(importlib.import_module(f"memopt.cli.{name}"), name)
        # typer shortens a docstring in the list of commands, but not a short help.
        first = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        app.command(name, short_help=first)(function)
    return app


def _globals(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours; NO_COLOR=1 does the same.")] = False,
) -> None:
    pass  # handled before parsing, so that they work anywhere in the line


def _take_globals(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """(arguments without the global options, whether to show tracebacks)."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    mine = arguments[:end]
    if "--no-color" in mine:
        os.environ["NO_COLOR"] = "1"
    rest = [word for word in mine if word not in ("--no-color", "--debug")]
    return [*rest, *arguments[end:]], "--debug" in mine


def _run(arguments: list[str], command: str | None, *, as_json: bool, debug: bool) -> int:
    if arguments[:1] == ["--version"]:
        print(f"memopt {memopt.__version__}")
        return common.EXIT_OK
    if not arguments and _COMPLETION not in os.environ:
        with contextlib.redirect_stdout(sys.stderr):
            build_app()(["--help"], prog_name="memopt", standalone_mode=False)
        return common.EXIT_ERROR
    try:
        code = build_app()(arguments, prog_name="memopt", standalone_mode=False)
        if code == common.EXIT_INTERRUPTED:  # typer's translation of Ctrl-C
            raise KeyboardInterrupt
    except _UsageError as error:
        return common.report_error(_explain(error, command), command=command, as_json=as_json, debug=False)
    except (BrokenPipeError, StreamError):
        raise
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == 0:  # typer, when it has printed completions
            return common.EXIT_OK
        if isinstance(error.__context__, BrokenPipeError):  # typer's translation of it
            raise BrokenPipeError from None
        cause = KeyboardInterrupt() if isinstance(error, typer.Abort) else error
        return common.report_error(cause, command=command, as_json=as_json, debug=debug)
    return code if isinstance(code, int) else common.EXIT_OK


def _explain(error: Exception, command: str | None) -> UsageError:
    message = str(getattr(error, "message", error)).rstrip(".?")
    if not isinstance(error, typer.BadParameter):
        near = getattr(error, "possibilities", None)
        end = "?" if "Did you mean" in message else "."
        return UsageError(f"{message}{end}", f"Did you mean {near[0]}?" if near else _try_help(command))
    error.message = _in_words(error)
    full: str = error.format_message()
    return UsageError(full.rstrip(".") + ".", _try_help(command))


def _in_words(error: typer.BadParameter) -> str:
    """The error's message; one of typer's parser, which speaks of its own types, in words that show the value."""
    fault: dict[str, Any] = next(iter(getattr(error.__context__, "errors", list)()), {})
    if words := _FAULTS.get(fault.get("type", "")):
        return words.format(fault["input"], *fault.get("ctx", {}).values())
    return error.message.replace("Value error, ", "")


def _try_help(command: str | None) -> str:
    return f"See `memopt {command} --help`." if command else "See `memopt --help`."
