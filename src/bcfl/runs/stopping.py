"""What stops a run in the middle, and how its user is told to go on."""

import contextlib
import errno
from collections.abc import Iterator

from bcfl.runs.store import RunFolder


class RunStoppedError(Exception):
    """A run could not go on, but nothing is lost: it can be resumed."""


@contextlib.contextmanager
def resumable(folder: RunFolder, how: str) -> Iterator[None]:
    """Whatever stops a run in here, its user is told how it goes on."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise RunStoppedError(f"the run in {folder.path} stopped: {reason}; continue it with {how}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"continue the run with {how}") from None
    except Exception as error:  # a user's model may raise anything, and who wrote it needs to see where
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):  # as torch says it
            raise _out_of_memory(folder, how) from error
        if not isinstance(error, ValueError) and folder.has("rounds.jsonl"):  # a ValueError would come again
            error.add_note(f"The rounds until then are kept: continue the run with {how}")
        raise


def _out_of_memory(folder: RunFolder, how: str) -> Exception:
    remedy = "take a smaller model, or fewer clusters or hypotheses"
    if not folder.has("rounds.jsonl"):
        return ValueError(f"this machine has not enough memory for the run's first models: {remedy}")
    return RunStoppedError(f"the run in {folder.path} stopped: not enough memory; {remedy}, or continue it where there "
                           f"is more, with {how}")  # fmt: skip
