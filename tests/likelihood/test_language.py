"""Language models by tokens: a small transformer, and LoRA's adapters on a larger one that stays where it is."""

from pathlib import Path
from typing import Any

import pytest
import sklearn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bcfl

LENGTH, NUM_TOKENS = 24, 96  # characters of a text, and how many different ones there are


def tokens(text: str) -> Tensor:
    return torch.tensor([min(max(ord(letter) - 31, 0), NUM_TOKENS - 1) for letter in text])


def clients(num_texts: int = 100) -> list[dict[str, Any]]:
    """Two that write English and two that write Python: scikit-learn's descriptions of data sets, and its code."""
    root, found = Path(sklearn.__file__).parent, []
    prose = "".join(file.read_text() for file in sorted((root / "datasets" / "descr").glob("*.rst")))
    code = "".join(file.read_text() for file in sorted((root / "metrics").glob("_*.py")))
    for group, text in enumerate((prose, code)):
        rows = tokens(text[: 4 * num_texts * (LENGTH + 1)]).view(-1, LENGTH + 1)
        mixed = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        for part in mixed.view(2, 2, num_texts, LENGTH + 1):
            (x, y), (x_test, y_test) = ((half[:, :-1], half[:, 1:]) for half in part)
            found.append({"x": x, "y": y, "x_test": x_test, "y_test": y_test, "group": group})
    return found


class Transformer(nn.Module):
    """One block of causal attention over characters."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.token, self.place = nn.Embedding(NUM_TOKENS, width), nn.Embedding(LENGTH, width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.scores = nn.Linear(width, NUM_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x.long()) + self.place.weight
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(-3, -2) for part in self.attend(self.first(h)).chunk(3, -1))
        weight = (q @ k.mT / q.shape[-1] ** 0.5 + torch.full((LENGTH, LENGTH), -1e9).triu(1)).softmax(-1)
        h = h + self.mix((weight @ v).transpose(-3, -2).flatten(-2))
        h = h + self.narrow(F.gelu(self.widen(self.second(h))))
        scores: Tensor = self.scores(h)
        return scores


SETTINGS: dict[str, Any] = {"likelihood": "tokens", "num_clusters": 2, "optimizer": "adam", "learning_rate": 0.005,
                            "batch_size": 16, "progress": False}  # fmt: skip


@pytest.mark.slow
def test_writers_of_prose_and_of_code_are_told_apart() -> None:
    result = bcfl.train(Transformer, clients(), rounds=4, local_steps=10, method="bcfl-g-w", **SETTINGS)
    first, last = result.history[1], result.history[-1]
    assert last["ari"] == 1.0
    assert last["perplexity"] < first["perplexity"] < NUM_TOKENS
    assert last["perplexity"] < 30


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what peft reads from transformers
def test_only_adapters_travel_and_are_clustered() -> None:
    peft = pytest.importorskip("peft", reason="wants peft and transformers")
    transformers = pytest.importorskip("transformers", reason="wants peft and transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": NUM_TOKENS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "tie_word_embeddings": False}
    config = transformers.GPT2Config(**sizes, **quiet)
    base = transformers.GPT2LMHeadModel(config)
    into = {"target_modules": ["c_attn", "c_fc"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True}
    lora = peft.LoraConfig(r=4, lora_dropout=0.0, **into)
    adapted = peft.get_peft_model(base, lora)
    frozen = {name: p.clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    result = bcfl.train(bcfl.adapters(adapted), clients(), rounds=3, local_steps=10, method="bcfl-g-w", **SETTINGS)
    assert result.history[-1]["ari"] == 1.0
    assert result.history[-1]["perplexity"] < result.history[1]["perplexity"]
    num_travelling = result.state.hypotheses.models.mean.shape[1] - result.config.training.num_carried(trained)
    assert num_travelling == trained < sum(p.numel() for p in adapted.parameters()) / 2
    assert all(torch.equal(p, frozen[name]) for name, p in adapted.named_parameters() if name in frozen)


def test_a_network_without_anything_to_train_has_no_adapters() -> None:
    with pytest.raises(ValueError, match="no parameters to train"):
        bcfl.adapters(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="BatchNorm, whose statistics would stay behind"):
        bcfl.adapters(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
