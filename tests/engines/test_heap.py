"""Freed memory is kept for the next client, in every thread, unless the user has other plans."""

import os
import platform
import subprocess
import sys

import pytest

from bcfl.engines.heap import physical_memory

FAULTS = """
import resource, threading, torch
from statistics import median
from torch import nn
from bcfl.engines.heap import give_back_memory, keep_blocks, keep_freed_memory
from bcfl.belief.gaussian import flat
from bcfl.client.examples import Examples
from bcfl.client.trainer import Alone, Job, Training, fit
from bcfl.model.flat import FlatModel
from bcfl.model.zoo import cifar_cnn, fashion_cnn, mlp

factory = {factory}
kept = keep_freed_memory(factory)
torch.set_num_threads(1)
size = Training().batch_size + 1  # a client no larger than a batch would also take gradients of single examples
examples = Examples(torch.randn(size, *{shape}), torch.arange(size) % 2, torch.arange(size), {images})

def train():
    model = FlatModel(factory())
    keep_blocks(model.vector.nbytes)  # more than glibc keeps by itself
    prior = flat(model.vector.clone())
    faults = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        job = Job(prior.mean, prior, examples, torch.Generator(), Training(local_steps=5), curvature=True)
        fit(Alone(model), [job])
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(kept, median(faults))  # a block may find no gap of its size, and the heap grows; but that ends

thread = threading.Thread(target=train)
thread.start()
thread.join()
give_back_memory()
print(open("/proc/self/statm").read().split()[1])
"""


GROWTH = """
import os
from bcfl.data.datasets import load
from bcfl.data.partition import partition
from bcfl.engines.heap import keep_freed_memory
from bcfl.engines.simulator import Simulator
from bcfl.client.trainer import Training
from bcfl.methods.attentive import FedSoft
from bcfl.model.zoo import mlp

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

keep_freed_memory()
data, training = partition(load("digits"), "feature(4,2)", 0), Training(local_steps=1, batch_size=8)
with Simulator(lambda: mlp(num_hidden=70_000), data, training, 0, num_workers=1) as engine:
    before, method = resident(), FedSoft(scoring_examples=8)
    state = method.init(engine.begin(0))
    for index in range(1, 5):
        state, _ = method.round(state, engine.begin(index))
    print((resident() - before) / (4 * engine.layout.length))
"""


HEAPS = """
import ctypes, threading, torch
from bcfl.engines.heap import keep_freed_memory
from bcfl.model.zoo import amazon_mlp, cifar_cnn

keep_freed_memory({first})
keep_freed_memory({second})  # too late: the first call decides
thread = threading.Thread(target=lambda: torch.ones(1000))
thread.start()
thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
"""


LARGE_MODEL = "lambda: nn.Sequential(nn.Linear(6000, 1500), nn.ReLU(), nn.Linear(1500, 2))", (6000,), False  # 36 MB


def measured(factory: str, shape: tuple[int, ...], images: bool, **environment: str) -> tuple[str, int, int]:
    """Whether memory is kept, page faults of a usual client's five steps, bytes held at the end."""
    kept, faults, pages = told_by(FAULTS.format(factory=factory, shape=shape, images=images), **environment)
    return kept, int(faults), int(pages) * os.sysconf("SC_PAGESIZE")


def told_by(script: str, **environment: str) -> list[str]:
    """What a script prints in a process of its own, whose allocator nobody has set up beforehand."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=own | environment
    )
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_a_client_is_trained_in_the_pages_of_the_one_before_and_the_kernel_gets_them_in_the_end() -> None:
    kept, faults, resident = measured(*LARGE_MODEL)
    users_kept, users_faults, users_resident = measured(*LARGE_MODEL, MALLOC_TRIM_THRESHOLD_="131072")
    assert (kept, users_kept) == ("True", "False")
    assert 10 * faults < users_faults
    assert resident < users_resident + 32e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_stacks_of_models_leave_no_gaps_in_the_memory_that_is_kept() -> None:
    """Eight clients' own models, old and new, four centres and what a round takes on the way: some 20 vectors.

    They were more than 50 after four rounds, and more every few rounds, when stacks lay in the heap, too.
    """
    (vectors,) = map(float, told_by(GROWTH))
    assert 12 < vectors < 40


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.parametrize(
    ("first", "second", "one_heap"),
    [
        ("cifar_cnn", "amazon_mlp", False),
        ("amazon_mlp", "cifar_cnn", True),
        ("cifar_cnn, amazon_mlp", "cifar_cnn", True),  # as a sweep over both does
        ("lambda: cifar_cnn()", "cifar_cnn", True),  # a user's own, of which nothing is known
        ("", "cifar_cnn", True),
    ],
)
def test_threads_share_a_heap_unless_all_models_are_known_to_be_small(first: str, second: str, one_heap: bool) -> None:
    heaps = sum(word.startswith("<heap") for word in told_by(HEAPS.format(first=first, second=second)))
    assert (heaps == 1) is one_heap


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.parametrize(
    ("model", "shape", "images"),
    [("mlp", (64,), False), ("fashion_cnn", (28, 28, 1), True), ("cifar_cnn", (32, 32, 3), True)],
)
def test_a_small_model_is_trained_without_fresh_pages_in_a_heap_of_its_thread(
    model: str, shape: tuple[int, ...], images: bool
) -> None:
    kept, faults, _ = measured(model, shape, images)
    _, users_faults, _ = measured(model, shape, images, MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "True"
    # How blocks lie in the heap hangs on as little as the name of the folder: one of them may find no gap of its size,
    # time and again (on one machine 196 pages in one folder and none in another; 22,492 if nothing is kept).
    assert faults < 50 + users_faults / 50


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_memory_that_the_machine_has_is_what_the_kernel_says() -> None:
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemTotal:"))
    assert physical_memory() == total
