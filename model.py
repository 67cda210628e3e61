"""A small decoder-only transformer: pre-norm blocks, causal attention, untied output head.

It knows nothing of ranks, devices or FSDP. Every module that owns parameters has `reset_parameters()` for just those:
the model can be built on the meta device and filled in one sharded unit at a time.

Shapes: B sequences, T positions, C = d_model, H heads, D = C / H, V = vocab_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over C in float32, whatever the dtype of input and weight; float32 output.

    CUDA's autocast runs layer_norm in float32 by itself, CPU's does not, and under FSDP's MixedPrecision the weight
    arrives in low precision. Saying it here makes all devices do the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), None, self.eps)


class Linear(nn.Linear):
    """Linear layer without bias whose weight starts as N(0, std^2)."""

    def __init__(self, fan_in: int, fan_out: int, std: float) -> None:
        self.std = std  # before super().__init__(), which calls reset_parameters()
        super().__init__(fan_in, fan_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Module):
    """Sum of a token embedding and a learned position embedding, (B, T) int64 -> (B, T, C)."""

    def __init__(self, vocab_size: int, max_seq_len: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(vocab_size, d_model))
        self.position = nn.Parameter(torch.empty(max_seq_len, d_model))
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(F.embedding(tokens, self.token) + self.position[: tokens.shape[1]])


class Block(nn.Module):
    """Causal self-attention and a GELU MLP, each normalised before and added after, (B, T, C) -> (B, T, C).

    The two projections that write to the residual stream start smaller by 1 / sqrt(2 * n_layers), so that its variance
    does not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
    """

    def __init__(self, d_model: int, n_heads: int, n_layers: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        residual_std = 0.02 / (2 * n_layers) ** 0.5
        self.attention_norm = LayerNorm(d_model, bias=False)
        self.qkv = Linear(d_model, 3 * d_model, std=0.02)
        self.attention_out = Linear(d_model, d_model, std=residual_std)
        self.mlp_norm = LayerNorm(d_model, bias=False)
        self.mlp_in = Linear(d_model, 4 * d_model, std=0.02)
        self.mlp_out = Linear(4 * d_model, d_model, std=residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(y.transpose(1, 2).reshape(B, T, C))


class Head(nn.Module):
    """Final norm and projection to the vocabulary, (B, T, C) -> (B, T, V).

    The projection starts small enough for logits of variance 0.01 at any width: the initial loss is ln(V).
    """

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = LayerNorm(d_model, bias=False)
        self.out = Linear(d_model, vocab_size, std=0.1 / d_model**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Transformer(nn.Module):
    """Language model, (B, T) int64 tokens in [0, V) -> (B, T, V) logits for the token after each position.

    Raises ValueError if n_heads does not divide d_model, or if T > max_seq_len.
    """

    def __init__(
        self, *, vocab_size: int, max_seq_len: int, d_model: int, n_heads: int, n_layers: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model = {d_model} is not a multiple of n_heads = {n_heads}")
        self.max_seq_len = max_seq_len
        self.embedding = Embedding(vocab_size, max_seq_len, d_model, dropout)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, n_layers, dropout) for _ in range(n_layers))
        self.head = Head(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.max_seq_len:
            raise ValueError(f"{tokens.shape[1]} tokens in a sequence, but max_seq_len = {self.max_seq_len}")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
