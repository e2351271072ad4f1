"""Time and memory as ratios measured in one run, so that a figure means the same on every machine."""

import ctypes
import gc
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
T = TypeVar("T")


def row(name: str, value: float, target: float, unit: str, note: str = "") -> Row:
    """One figure that is fine when it does not exceed its target."""
    verdict = "ok" if value <= target else "short"
    return {"name": name, "value": value, "target": target, "unit": unit, "verdict": verdict, "note": note}


def best_seconds(*operations: Callable[[], object], repeats: int) -> list[float]:
    """The shortest time of each operation; they take turns, so that a busy spell of the machine meets all alike."""
    best = [float("inf")] * len(operations)
    for _ in range(repeats):
        for i, operation in enumerate(operations):
            start = time.perf_counter()
            result = operation()
            best[i] = min(best[i], time.perf_counter() - start)
            del result  # freeing is not part of the operation, and must not overlap with the next
    return best


def repeated(operation: Callable[[], object], times: int) -> Callable[[], None]:
    """The operation so many times in a row."""

    def play() -> None:
        for _ in range(times):
            operation()

    return play


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """What the function returns in a process that has done nothing else: how memory is laid out hangs on the past."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def peak_bytes(prepare: Callable[[], Callable[[], Any]], tell: Callable[[Any], Any] = type) -> tuple[int, Any]:
    """The most memory that `prepare()()` holds at any moment beyond what `prepare` left, its result included.

    Also what `tell` has to say of the result, by default its type. The operating system counts: Linux keeps the
    high-water mark of resident memory and resets it on request, so nothing is missed between samples and no allocator
    is trusted to report itself. A fresh process per measurement, because memory that an earlier one freed but did not
    return would be used again unseen.
    """
    return in_own_process(_peak_bytes_here, prepare, tell)


def _peak_bytes_here(prepare: Callable[[], Callable[[], Any]], tell: Callable[[Any], Any]) -> tuple[int, Any]:
    operation = prepare()
    gc.collect()
    # What `prepare` freed must not be used again unseen. give_back_memory would set the allocator up where nobody did.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present size
    before = status_bytes("VmRSS")
    result = operation()
    peak = status_bytes("VmHWM")
    return peak - before, tell(result)


def status_bytes(field: str, process: int | str = "self") -> int:
    """What the system counts of a process's memory."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/{process}/status has no {field}: memory can be measured on Linux only")
    return int(found[1]) * 1024


def show(rows: Sequence[Row], before: Sequence[Row]) -> None:
    """Print the figures, each beside its value of the time before."""
    previous = {row["name"]: f"{row['value']:.2f}" for row in before}
    width = max(len(row["name"]) for row in rows)
    print(f"{'':<{width}}    now  before")
    for row in rows:
        was = previous.get(row["name"], "-")
        figure = f"{row['value']:6.2f}  {was:>6}  target ≤ {row['target']:.3g} {row['unit']}"
        print(f"{row['name']:<{width}} {figure}  {row['verdict']}")
        print(f"{'':<{width}}  {row['note']}")
