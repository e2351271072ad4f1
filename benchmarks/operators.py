"""Where a client's time goes: the share of each kind of operator in training a net and in scoring with it."""

from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile
from workloads import NETS, SEED, Workload

from bcfl.belief.gaussian import Gaussian
from bcfl.client.examples import Examples, pool
from bcfl.client.score import log_likelihoods
from bcfl.client.trainer import Alone, Job, fit
from bcfl.engines.heap import keep_blocks
from bcfl.model.flat import FlatModel, build
from bcfl.randomness import generator

KINDS = {
    "convolution": ("conv", "mkldnn_convolution", "thnn_conv", "slow_conv"),
    "matrix product": ("mm", "addmm", "bmm", "linear"),
    "BatchNorm": ("batch_norm",),
    "pooling": ("max_pool",),
    "step (vectors of P)": (
        "add", "add_", "mul", "mul_", "sub_", "addcmul_", "lerp_", "reciprocal", "_fused_sgd_", "zero_", "copy_",
        "fill_",
    ),
    "ReLU, dropout": ("relu", "threshold", "clamp_min", "bernoulli_"),
    "gathering a batch": ("index",),
}  # fmt: skip
REST = "the rest"


def shares(nets: tuple[Workload, ...] = NETS) -> dict[str, dict[str, float]]:
    """net and task -> kind of operator -> its share of the time, largest first."""
    found = {}
    for net in nets:
        for task in ("training", "scoring"):
            found[f"{net.name}, {task}"] = _shares(net, task)
    return found


def _shares(net: Workload, task: str) -> dict[str, float]:
    data = net.data()
    x, images = pool(data.x_train)
    own = Examples(x, data.y_train, data.train_of[0], images)
    model = FlatModel(build(net.factory, SEED, "operators"))
    belief = Gaussian(model.vector.clone(), torch.ones_like(model.vector))
    threads = torch.get_num_threads()

    def work() -> None:
        if task == "training":
            stream = generator(SEED, "operators")
            fit(Alone(model), [Job(belief.mean, belief, own, stream, net.training, curvature=True)])
        else:
            log_likelihoods(model, belief.mean[None], own, torch.arange(len(own)))

    keep_blocks(belief.mean.nbytes)
    torch.set_num_threads(1)
    try:
        work()  # what torch loads at first use is not the net's
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
            work()
    finally:
        torch.set_num_threads(threads)
    time: dict[str, float] = defaultdict(float)
    for event in recorded.key_averages():
        time[_kind(event.key)] += event.self_cpu_time_total
    total = sum(time.values())
    return {kind: value / total for kind, value in sorted(time.items(), key=lambda item: -item[1])}


def _kind(operator: str) -> str:
    name = operator.removeprefix("aten::").lower()
    for kind, parts in KINDS.items():
        exact = kind.startswith(("matrix", "step"))
        if name in parts if exact else any(part in name for part in parts):
            return kind
    return REST
