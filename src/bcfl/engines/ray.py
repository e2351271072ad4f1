"""The simulator's clients on a Ray cluster: batches of jobs go to actors, which hold or open the clients' data.

What is asked is the same, in the same batches, and answers are taken in the same order: results are the simulator's to
the bit, whatever the number of nodes. Beliefs travel once an exchange to each node, not with every batch. An actor that
is lost, with its node or alone, leaves its batches to the others.
"""

import io
import os
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bcfl.belief.gaussian import distinct
from bcfl.client.client import LocalClient
from bcfl.client.together import Together
from bcfl.client.trainer import Training
from bcfl.data.lazy import Held
from bcfl.engines.participation import Participation
from bcfl.engines.simulator import Simulator
from bcfl.model.flat import ModelFactory

AHEAD = 2  # batches that wait at an actor: so that it need not wait itself
LARGE = 1 << 14  # numbers: a tensor from that size on is sent to each node once, smaller ones with their batch
HINT = "install it by pip install 'bcfl[ray]'"


@dataclass(frozen=True)
class Cluster:
    """Which cluster, and what of it an actor takes."""

    address: str | None = None  # of one that runs; None: one is started on this machine
    gpus_per_worker: float = 0.0

    @staticmethod
    def parse(device: str) -> "Cluster | None":
        """What a device's name says: ray, ray:ADDRESS, and at its end perhaps ,gpus=N; None of any other device."""
        if device != "ray" and not device.startswith(("ray:", "ray,")):
            return None
        name, _, gpus = device.partition(",gpus=")
        try:
            return Cluster(name.partition(":")[2] or None, float(gpus or 0))
        except ValueError:
            raise ValueError(f"device {device!r}: gpus must be a number") from None

    def __str__(self) -> str:
        address = f":{self.address}" if self.address else ""
        return f"ray{address}" + (f",gpus={self.gpus_per_worker:g}" if self.gpus_per_worker else "")


class RayWorkers:
    """Actors that play tasks side by side, each with the data and a network of its own."""

    def __init__(self, cluster: Cluster, count: int | None, site: "Site"):
        self._ray = ray = _ray()
        self._started = not ray.is_initialized()
        if self._started:
            here = {"num_cpus": count or os.cpu_count()} if cluster.address is None else {"address": cluster.address}
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", **here)
        self.count = count or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        kind = ray.remote(num_cpus=1, num_gpus=cluster.gpus_per_worker, scheduling_strategy="SPREAD")(Actor)
        held = ray.put(site)
        self._actors = [kind.remote(held) for _ in range(self.count)]

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._started:
            self._ray.shutdown()

    def stream(self, tasks: Iterable[partial[Any]]) -> Iterator[Any]:
        """The results of the tasks, in their order; only a few are ever ahead, so that memory stays bounded."""
        waiting: deque[_Sent] = deque()
        sent: dict[Any, Any] = {}  # tensors of this exchange that every node gets once
        for task in tasks:
            waiting.append(self._send(Parcel.of(task), sent, waiting))
            if len(waiting) > AHEAD * len(self._actors):
                yield self._first(waiting, sent)
        while waiting:
            yield self._first(waiting, sent)

    def _send(self, parcel: "Parcel", sent: dict[Any, Any], waiting: Iterable["_Sent"]) -> "_Sent":
        if not self._actors:
            raise RuntimeError("no actor of the Ray cluster is left: start nodes, and resume the run")
        open_refs = [one.answer for one in waiting]
        _, busy = self._ray.wait(open_refs, num_returns=len(open_refs), timeout=0) if open_refs else ([], [])
        load = {id(actor): 0 for actor in self._actors}
        for one in waiting:
            if one.answer in busy and id(one.actor) in load:
                load[id(one.actor)] += 1
        actor = min(self._actors, key=lambda one: load[id(one)])
        tensors = [self._reference(tensor, sent) for tensor in parcel.tensors]
        return _Sent(parcel, actor, actor.play.remote(parcel.content, parcel.wanted, parcel.later, *tensors))

    def _reference(self, tensor: Tensor, sent: dict[Any, Any]) -> Any:
        if tensor.numel() < LARGE:
            return tensor.numpy()
        key = _key(tensor)
        if key not in sent:
            sent[key] = (self._ray.put(tensor.numpy()), tensor)  # the tensor, so that its memory is not another's
        return sent[key][0]

    def _first(self, waiting: "deque[_Sent]", sent: dict[Any, Any]) -> Any:
        """The first task's answer; those of an actor that is lost are sent to others."""
        while True:
            try:
                answer = self._ray.get(waiting[0].answer)
                waiting.popleft()
                return answer
            except self._ray.exceptions.RayTaskError as error:  # what the task itself has raised
                raise error.cause from None
            except self._ray.exceptions.RayError:
                lost = waiting[0].actor
                self._actors = [actor for actor in self._actors if actor is not lost]
                for place, one in enumerate(waiting):
                    if one.actor is lost:
                        waiting[place] = self._send(one.parcel, sent, [*waiting][:place])


@dataclass(frozen=True)
class _Sent:
    parcel: "Parcel"
    actor: Any
    answer: Any


@dataclass(frozen=True)
class Parcel:
    """A task as bytes, without the clients and tensors that it speaks of: clients are where the task goes."""

    content: bytes
    wanted: list[int]
    later: bool  # as they are once their data have changed
    tensors: list[Tensor]

    @staticmethod
    def of(task: partial[Any]) -> "Parcel":
        buffer = io.BytesIO()
        packer = _Packer(buffer)
        packer.dump(task)
        return Parcel(buffer.getvalue(), sorted(packer.wanted), packer.later, list(packer.tensors.values()))


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO):
        super().__init__(buffer, protocol=5)
        self.wanted, self.later, self.tensors = set[int](), False, dict[Any, Tensor]()
        self._places: dict[Any, int] = {}

    def persistent_id(self, found: Any) -> Any:
        if isinstance(found, LocalClient):
            self.wanted.add(found.index)
            self.later |= found.holder is not None
            return "client", found.index
        if not isinstance(found, Tensor):
            return None
        plain = distinct(found.detach())  # an expanded one as the numbers that it repeats
        key = _key(plain)
        place = self._places.setdefault(key, len(self._places))
        self.tensors.setdefault(key, plain)
        return "tensor", place, tuple(found.shape)


def _key(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class _Unpacker(pickle.Unpickler):
    def __init__(self, content: bytes, clients: Any, tensors: Sequence[Any]):
        super().__init__(io.BytesIO(content))
        self._clients, self._made = clients, dict[Any, Tensor]()
        self._tensors = [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in tensors]

    def persistent_load(self, told: Any) -> Any:
        if told[0] == "client":
            return self._clients[told[1]]
        _, place, shape = told
        # One object for all that shared their memory: jobs with one belief are known by that.
        return self._made.setdefault((place, shape), self._tensors[place].expand(shape))


@dataclass(frozen=True)
class Site:
    """All that an actor is made of: how clients and networks come about; the data, or how they are opened."""

    factory: ModelFactory
    data: Held
    training: Training
    seed: int
    device: str
    together: Together

    def open(self) -> Simulator:
        how = {"num_workers": 1, "device": self.device, "together": self.together}
        return Simulator(self.factory, self.data, self.training, self.seed, **how)  # type: ignore[arg-type]


class Actor:
    """A process of the cluster that plays tasks."""

    def __init__(self, site: Site):
        torch.set_num_threads(1)
        self._simulator = site.open()

    def play(self, content: bytes, wanted: list[int], later: bool, *tensors: Any) -> Any:
        drift = self._simulator.drift
        clients = self._simulator.clients_in(drift.round if drift and later else 0, wanted)
        task = _Unpacker(content, clients, tensors).load()
        (answer,) = self._simulator.play([task])
        return answer


def ray_simulator(
    cluster: Cluster,
    factory: ModelFactory,
    data: Held,
    training: Training,
    seed: int,
    participation: Participation | None = None,
    num_workers: int | None = None,
    together: Together = None,
) -> Simulator:
    """The simulator whose clients compute on a Ray cluster; of lazy clients this process opens the first only."""
    site = Site(factory, data, training, seed, "cuda" if cluster.gpus_per_worker else "cpu", together)
    return Simulator(
        factory, data, training, seed, participation, num_workers, together=together,
        hire=lambda count: RayWorkers(cluster, count, site),
    )  # fmt: skip


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise ValueError(f"engine ray needs the package ray: {HINT}") from None
    return ray
