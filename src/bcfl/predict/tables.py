"""A model that takes rows of a table as they are, and answers in the table's own words and units."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bcfl.data.tables import Form
from bcfl.likelihood import likelihood_of


class TablePredictor(nn.Module):
    """The network that serves a site, and how that table's rows are prepared for it."""

    def __init__(self, module: nn.Module, form: Form):
        super().__init__()
        self.module, self.form = module, form
        self.eval()

    def forward(self, x: Any) -> Tensor:
        """The network's outputs for a frame or an array of its feature columns, or for a tensor of prepared inputs."""
        outputs: Tensor = self.module(x if isinstance(x, Tensor) else self.form.inputs(x))
        return outputs

    def predict_proba(self, x: Any) -> npt.NDArray[np.float64]:
        """p(class | x), the classes in the order of `form.target.classes`."""  # (row, class)
        if not self.form.target.classes:
            raise ValueError(f"target {self.form.target.columns[0]!r} has no classes: use predict")
        return self._mean(x)

    def predict(self, x: Any) -> npt.NDArray[Any]:
        """The likeliest class by its name, or the mean in the target's own units."""  # (row,)
        mean, classes = self._mean(x), self.form.target.classes
        return np.array(classes)[mean.argmax(1)] if classes else mean

    def _mean(self, x: Any) -> npt.NDArray[np.float64]:
        with torch.no_grad():
            mean: npt.NDArray[np.float64] = likelihood_of(self.module).mean(self(x)).double().numpy()
        return mean
