"""Networks of which only a part is trained: that alone travels and is clustered, such as LoRA's adapters.

make = bcfl.adapters(peft.get_peft_model(pretrained, peft.LoraConfig(r=8)))
result = bcfl.train(make, clients, likelihood="tokens")
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from bcfl.model.flat import ModelFactory

SPREAD = 0.01  # by which the first models of clusters differ: equal ones would never part


class Adapters(nn.Module):
    """A network that shows only those of its parameters that are trained; the others are the same for everybody."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self._held = (network,)  # in a tuple, where torch does not see it
        self._name_of = {name.replace(".", "/"): name for name, p in network.named_parameters() if p.requires_grad}
        for key, name in self._name_of.items():
            self.register_parameter(key, network.get_parameter(name))

    def forward(self, x: Tensor) -> Tensor:
        """The network's output; of what Hugging Face's models return, the logits. x are tokens as float32."""
        values = {name: self._parameters[key] for key, name in self._name_of.items()}
        output: Any = functional_call(self._held[0], values, (x.long(),) if self.reads_tokens else (x,))  # type: ignore[arg-type]
        logits: Tensor = output.logits if hasattr(output, "logits") else output
        return logits

    @property
    def reads_tokens(self) -> bool:
        """Whether the first layer of the network is an embedding."""
        return any(isinstance(layer, nn.Embedding) for layer in self._held[0].modules())

    def train(self, mode: bool = True) -> "Adapters":
        self._held[0].train(mode)
        super().train(mode)
        return self


def adapters(network: nn.Module, spread: float = SPREAD) -> ModelFactory:
    """Makes models that are this network, of which only those parameters travel that are trained (requires_grad).

    Their first values scatter by `spread` around the network's own. The rest is copied and never changes, so it must be
    the same on every machine of a federation.
    """
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError(
            "model has no parameters to train: freeze the rest of it, and leave its adapters requires_grad"
        )
    if any(isinstance(layer, _BatchNorm) and layer.track_running_stats for layer in network.modules()):
        raise ValueError("model has BatchNorm, whose statistics would stay behind: adapters need a network without")

    def make() -> nn.Module:
        made = Adapters(copy.deepcopy(network))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(spread * torch.randn(parameter.shape))
        return made

    return make
