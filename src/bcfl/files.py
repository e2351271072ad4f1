"""Files that a crash or another process may meet at any moment: written whole or not at all, read as far as they go."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which is `path` once the block is over; whatever happens before, `path` is as it was.

    Where nothing keeps several processes from writing it at once it is `shared`: each has a temporary file of its own.
    """
    mark = f".{secrets.token_hex(4)}" if shared else ""
    temporary = path.with_name(f"{path.name}{mark}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error  # its user knows no temporary file
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """The file with this content, or, whatever happens, the file as it was before."""
    with replacing(path) as file:
        file.write(content)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class GrowingLog(Generic[T]):
    """What another process has written into a log file so far, a record a line; what was read is not read again."""

    def __init__(self, path: Path, read: Callable[[bytes], T]):
        self._path, self._read = path, read
        self._size = self._end = 0  # of the file when it was read last, and of its complete lines
        self._records: list[T] = []

    def records(self) -> Sequence[T]:
        """All of them, or none if there is no such file; a line that is being written is left for later."""
        try:
            size = self._path.stat().st_size
            if size != self._size:
                self._read_on()
                self._size = size  # of a file that has grown meanwhile the rest is read next time
        except FileNotFoundError:
            return []
        return self._records

    def _read_on(self) -> None:
        with self._path.open("rb") as file:
            file.seek(max(self._end - 1, 0))
            text = file.read()
            if self._end and not text.startswith(b"\n"):  # cut back, as on resuming: no line ends there any more
                self._end, self._records = 0, []
                file.seek(0)
                text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._records += [self._read(line) for line in complete.splitlines() if line]
        self._end = max(self._end - 1, 0) + len(complete)
