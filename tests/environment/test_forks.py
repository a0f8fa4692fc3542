"""Independent work in forks of the process: the same results and errors as without them."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from memopt.environment import forks
from memopt.environment.forks import each, forking


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


def pid_after(other: int, written: int) -> int:
    """The process that runs this, once another one runs too."""
    os.write(written, b".")
    os.read(other, 1)
    return os.getpid()


def pid_soon(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def die_unless(parent: int, result: int) -> int:
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def tell_and_wait(written: int) -> None:
    os.write(written, b"%d\n" % os.getpid())
    time.sleep(60)


def fail(message: str) -> int:
    raise ValueError(message)


def test_work_is_shared_with_a_fork_where_that_is_allowed(two: None) -> None:
    (a, to_a), (b, to_b) = os.pipe(), os.pipe()
    with forking():
        found = each([partial(pid_after, a, to_b), partial(pid_after, b, to_a)])
    assert len(set(found)) == 2
    assert os.getpid() in found


def test_results_keep_their_order(two: None) -> None:
    with forking():
        assert each([partial(int, str(number)) for number in range(20)]) == list(range(20))


@pytest.mark.parametrize("allowed", [True, False])
def test_one_processor_or_no_permission_is_one_process(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0} if allowed else {0, 1})
    token = forks._allowed.set(allowed)
    assert each([os.getpid] * 4) == [os.getpid()] * 4
    forks._allowed.reset(token)


def test_a_fork_that_dies_leaves_its_work_to_the_process(two: None) -> None:
    with forking():
        assert each([partial(die_unless, os.getpid(), number) for number in range(6)]) == list(range(6))


def test_a_fork_in_which_backward_does_not_run_leaves_its_work_to_the_process(
    two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch forbids it where the parent's backward has begun threads, as it does with a GPU."""
    parent, run_backward = os.getpid(), torch.Tensor.backward

    def refuse_in_a_fork(tensor: torch.Tensor) -> None:
        if os.getpid() != parent:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        run_backward(tensor)

    monkeypatch.setattr(torch.Tensor, "backward", refuse_in_a_fork)
    with forking():
        assert each([partial(pid_soon, 0.01)] * 20) == [parent] * 20


def test_the_error_is_the_first_in_order(two: None) -> None:
    work: list[Callable[[], int]] = [os.getpid, partial(fail, "first"), partial(fail, "second")]
    with forking(), pytest.raises(ValueError, match="first"):
        each(work)


@pytest.mark.parametrize("killed_by", [signal.SIGTERM, signal.SIGKILL])
def test_no_fork_outlives_a_process_that_is_killed(two: None, killed_by: signal.Signals) -> None:
    told, tell = os.pipe()
    process = os.fork()
    if not process:
        try:
            with forking():
                each([partial(tell_and_wait, tell)] * 2)
        finally:
            os._exit(0)  # whatever stops it: the rest of the run belongs to its parent
    os.close(tell)
    with open(told) as both:
        assert process in {int(both.readline()) for _ in range(2)}
        os.kill(process, killed_by)
        os.waitpid(process, 0)
        # Every process that is alive holds the other end.
        assert select.select([both], [], [], 10) == ([both], [], [])
        assert both.read() == ""


def test_where_no_process_can_be_started_this_one_does_the_work(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with forking():
        assert each([partial(divmod, number, 2) for number in range(3)]) == [(0, 0), (0, 1), (1, 0)]
