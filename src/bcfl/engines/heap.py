"""The C library's allocator, set up for a process that asks for the same large blocks again and again."""

import ctypes
import os

from bcfl.model.flat import ModelFactory
from bcfl.model.zoo import cifar_cnn, fashion_cnn, mlp

# glibc's parameters and their numbers, from malloc.h: they have no other door.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
LEAST_BLOCK = 32 << 20  # bytes: blocks up to this are kept in any case; glibc by itself goes no higher
NEVER = -1  # as a threshold: freed memory at the end of the heap is kept, however much
PAGE = 1 << 12  # bytes: more than what the allocator adds to a block
PAD = 64 << 20  # bytes: the least by which the heap grows
# A thread's heap has 64 MB: these are known to need less for a batch of the usual size, activations included.
SMALL_MODELS: tuple[ModelFactory, ...] = (mlp, fashion_cnn, cifar_cnn)

_kept: bool | None = None  # what keep_freed_memory has said; None before its first call


def keep_freed_memory(*factories: ModelFactory | None) -> bool:
    """Whether freed memory now stays with the process, to be used again; with glibc only.

    By default glibc takes every block above 32 MB from the kernel and gives it back when it is freed, and so the end of
    the heap: each training step meets its gradients and activations as fresh pages, with a fault and a page of zeros
    for every 4 kB. And threads get heaps of 64 MB, out of which the blocks of a large model fall again: it needs one
    heap for all, in which threads wait for each other when they ask for a block. `SMALL_MODELS` are better off without.

    `factories` are those of all models that the process will train, None for an unknown one. The first call decides, as
    heaps that threads have by then stay: it must come before data are prepared, which may start torch's threads.
    Blocks above 32 MB are kept once `keep_blocks` says how large they are. An allocator that the user has set up is
    left alone.
    """
    global _kept
    if _kept is None:
        _kept = _set_up(one_heap=not factories or any(factory not in SMALL_MODELS for factory in factories))
    return _kept


def _set_up(one_heap: bool) -> bool:
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return False
    try:
        library = ctypes.CDLL(None)
        mallopt, _ = library.mallopt, library.gnu_get_libc_version  # other libraries' mallopt has other numbers
    except (AttributeError, OSError, TypeError):  # macOS, musl, Windows
        return False
    settings = {M_MMAP_THRESHOLD: LEAST_BLOCK, M_TRIM_THRESHOLD: NEVER, M_TOP_PAD: PAD}
    if one_heap:
        settings[M_ARENA_MAX] = 1
    return all(mallopt(name, value) for name, value in settings.items())


def keep_blocks(num_bytes: int) -> None:
    """Blocks up to that size, those of one model's numbers, are kept; larger ones come from the kernel and go back.

    Why not all: a small block that is put into the gap of a large one and outlives it leaves no room for the next large
    one, and the heap grows by another. With stacks of models in it, of many sizes, it went on growing round by round.
    A glibc that allows no more than 32 MB says no, and larger blocks are met as fresh pages as they were before.
    """
    if keep_freed_memory():
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, max(LEAST_BLOCK, num_bytes + PAGE))


def give_back_memory() -> None:
    """What is free now is the kernel's again; what is freed later stays, as `keep_freed_memory` set it up."""
    if keep_freed_memory():
        ctypes.CDLL(None).malloc_trim(0)


def physical_memory() -> int | None:
    """Bytes of memory that the machine has; None where the system does not tell."""
    try:
        size, count = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows; a system without these names
        return None
    return size * count if size > 0 and count > 0 else None
