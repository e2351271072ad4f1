"""How many jobs a CPU does together: a function of sizes alone, so that a run taken up again does the same.

One by one, a step of a small network is some thirty operations of which each costs more to call than to compute. Done
together they are as few for all jobs, until what they hold is more than the processor's cache: measured on one core
(benchmarks/together.py), the best number of jobs keeps about 2²⁰ numbers between the steps, parameters, momentum,
gradient and prior among them, and of networks with up to a million parameters two at a time still beat one.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bcfl.client.examples import Examples
from bcfl.client.kernels import tried_kernels
from bcfl.client.trainer import Training
from bcfl.model.flat import FlatModel

Together = Literal["auto"] | int | None  # None: one by one on a CPU, as many as memory holds on another device
CACHED = 1 << 20  # numbers
LARGEST = 1 << 21  # parameters: of larger networks the time goes into their vectors, however they are called
MOST = 128
VECTORS = 4  # of a job, between two steps
LEAST_VMAPPED = 32  # jobs: with fewer at a time what `vmap` costs is more than what it saves


def jobs_together(model: FlatModel, examples: Examples, training: Training) -> int:
    """How many jobs of this network are best done together on a CPU; 1: one by one."""
    kernels, size = tried_kernels(model, examples), min(training.batch_size, len(examples))
    if kernels is not None:
        if model.num_parameters > LARGEST:
            return 1
        held = VECTORS * model.num_parameters + size * kernels.num_activations
        return min(max(CACHED // held, 2), MOST)
    if VECTORS * model.num_parameters * LEAST_VMAPPED > CACHED:
        return 1
    held = VECTORS * model.num_parameters + num_kept(model, examples.batch(torch.arange(size))[0])
    return min(CACHED // held, MOST) if CACHED // held >= LEAST_VMAPPED else 1


def num_kept(model: FlatModel, x: Tensor) -> int:
    """How many numbers a step of the module on these inputs keeps for its gradient."""
    counted = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal counted
        counted += tensor.numel()
        return tensor

    model.module.train()
    model.seed(torch.Generator())
    before = model.vector.clone()
    with torch.random.fork_rng(devices=[]), saved_tensors_hooks(count, lambda tensor: tensor):
        model.module(x)
    model.load(before)  # BatchNorm has counted these inputs
    return counted
