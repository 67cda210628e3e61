"""A causal convolutional language model: copy this beside model.py, and end model.py with the lines below.

from my_model import Convolution, ConvolutionalLM
BLOCK, UNITS, SHAPE = Convolution, (nn.Embedding, Convolution, nn.Linear), ("vocab_size", "d_model", "n_layers")
Transformer = ConvolutionalLM
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.LayerNorm):
    """In float32, on CPU too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), None, self.eps)


class Convolution(nn.Module):
    """Gated causal convolution over the last 4 positions, (B, T, C) -> (B, T, C)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = Norm(d_model, bias=False)
        self.conv = nn.Conv1d(d_model, 2 * d_model, kernel_size=4)
        self.out = nn.Conv1d(d_model, d_model, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(self.norm(x).transpose(1, 2), (3, 0))
        value, gate = self.conv(past).chunk(2, dim=1)
        return x + self.out(value * gate.sigmoid()).transpose(1, 2)


class ConvolutionalLM(nn.Module):
    """(B, T) tokens -> (B, T, V) logits."""

    def __init__(self, *, vocab_size: int, d_model: int, n_layers: int, **_: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(Convolution(d_model) for _ in range(n_layers))
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits

    def flops_per_token(self) -> float:
        return 6.0 * sum(p.numel() for p in self.parameters())


class TiedLM(ConvolutionalLM):
    """One matrix for both ends: with UNITS = (Convolution,), the embedding stays gathered."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        del self.head

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight) / x.shape[-1]
