"""What stops a run in the middle, and how its user is told to go on."""

import contextlib
import errno
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bcfl.runs.store import RunFolder

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class RunStoppedError(Exception):
    """A run could not go on, but nothing is lost: it can be resumed."""


@contextlib.contextmanager
def resumable(folder: "RunFolder", how: str) -> Iterator[None]:
    """Whatever stops a run in here, its user is told how it goes on."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in DISK_IS_FULL else str(error)
        raise RunStoppedError(f"the run in {folder.path} stopped: {reason}; continue it with {how}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"continue the run with {how}") from None
    except Exception as error:  # a user's model may raise anything, and who wrote it needs to see where
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):  # as torch says it
            raise _out_of_memory(folder, how) from error
        if not isinstance(error, ValueError) and folder.has("rounds.jsonl"):  # a ValueError would come again
            error.add_note(f"The rounds until then are kept: continue the run with {how}")
        raise


def _out_of_memory(folder: "RunFolder", how: str) -> Exception:
    remedy = "take a smaller model, or fewer clusters or hypotheses"
    if not folder.has("rounds.jsonl"):
        return ValueError(f"this machine has not enough memory for the run's first models: {remedy}")
    return RunStoppedError(f"the run in {folder.path} stopped: not enough memory; {remedy}, or continue it where there "
                           f"is more, with {how}")  # fmt: skip


@contextlib.contextmanager
def ended_in_order(requests: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGHUP)) -> Iterator[None]:
    """A request to end this process is an interruption: its user is told how to go on, and what it started is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    # What is ignored stays so: whoever started this with nohup wants it to outlive the terminal.
    before = {number: signal.getsignal(number) for number in requests}
    heard = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]

    def interrupt(*_: object) -> None:
        for number in heard:  # a closing terminal asks more than once, and stopping must not be stopped half-way
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in heard:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
