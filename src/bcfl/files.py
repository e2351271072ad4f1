"""Files that a crash or another process may meet at any moment: written whole or not at all, read as far as they go."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


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
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
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
