"""A small decoder-only transformer: pre-norm blocks, causal attention, untied output head.

It knows nothing of ranks, devices or FSDP. Every module that owns parameters has
`reset_parameters()` for just those: the model can be built on the meta device and filled in one
sharded unit at a time.

Shapes: B sequences, T positions, C = d_model, H heads, D = C / H, V = vocab_size.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over C in float32, whatever the dtype of input and weight.

    CUDA's autocast runs layer_norm in float32 by itself, CPU's does not, and under FSDP's
    MixedPrecision the weight arrives in low precision. Said here, all devices do the same.
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
    """Causal self-attention and a GELU MLP, normalised before, added after, (B, T, C) -> (B, T, C).

    The two projections that write to the residual stream start smaller by 1 / sqrt(2 * n_layers),
    so that its variance does not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
    With `recompute` only the block's input is kept for backward, and the rest computed again.
    """

    def __init__(
        self, d_model: int, n_heads: int, n_layers: int, dropout: float, recompute: bool
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.recompute = recompute
        residual_std = 0.02 / (2 * n_layers) ** 0.5
        self.attention_norm = LayerNorm(d_model, bias=False)
        self.qkv = Linear(d_model, 3 * d_model, std=0.02)
        self.attention_out = Linear(d_model, d_model, std=residual_std)
        self.mlp_norm = LayerNorm(d_model, bias=False)
        self.mlp_in = Linear(d_model, 4 * d_model, std=0.02)
        self.mlp_out = Linear(4 * d_model, d_model, std=residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)

    def layers(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(y.transpose(1, 2).reshape(B, T, C))


class Head(nn.Module):
    """Final norm and projection to the vocabulary, (B, T, C) -> (B, T, V).

    The projection starts small enough for logits of variance 0.01 at any width: the initial loss is
    ln(V).
    """

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = LayerNorm(d_model, bias=False)
        self.out = Linear(d_model, vocab_size, std=0.1 / d_model**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Transformer(nn.Module):
    """(B, T) int64 tokens in [0, V) -> (B, T, V) logits for the token after each position.

    Raises ValueError if n_heads does not divide d_model, n_layers > 1000, or T > max_seq_len.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_seq_len: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        dropout: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            divisors = [n for n in range(1, d_model + 1) if d_model % n == 0]
            fits = min(divisors, key=lambda n: abs(n - n_heads))
            raise ValueError(f"n_heads = {n_heads} does not divide d_model = {d_model}: use {fits}")
        if n_layers > 1000:
            raise ValueError(f"n_layers = {n_layers} takes hours to build: use at most 1000")
        self.max_seq_len = max_seq_len
        self.embedding = Embedding(vocab_size, max_seq_len, d_model, dropout)
        self.blocks = nn.ModuleList(
            Block(d_model, n_heads, n_layers, dropout, recompute) for _ in range(n_layers)
        )
        self.head = Head(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.max_seq_len:
            raise ValueError(
                f"{tokens.shape[1]} tokens in a sequence, but max_seq_len = {self.max_seq_len}"
            )
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def flops_per_token(self) -> float:
        """FLOPs of forward and backward, recomputation not counted (PaLM, appendix B)."""
        T, C = self.embedding.position.shape
        parameters = sum(p.numel() for p in self.parameters())
        return 6.0 * parameters + 12 * len(self.blocks) * T * C


# ---- What the training script needs to know of the model ----

# The module that the model repeats, which `compile` compiles.
BLOCK = Block
# FSDP gathers a module of these classes whole just before it runs, and frees it just after.
UNITS = (Embedding, BLOCK, Head)
# The hyperparameters that fix the shapes of the weights.
SHAPE = ("vocab_size", "max_seq_len", "d_model", "n_heads", "n_layers")

# Dense FLOP/s of NVIDIA's data sheets, by part of the device's name: in float16 and bfloat16, and
# in float32 without TF32.
PEAK_FLOPS = {
    "A100": (312e12, 19.5e12),
    "H100 80GB HBM3": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "L40S": (362e12, 91.6e12),
    "A10,": (125e12, 31.2e12),
    "V100-SXM2": (125e12, 15.7e12),
    "T4,": (65e12, 8.1e12),
}


def build_model(config: Any) -> Transformer:
    """The model of a Config, on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Transformer(
            dropout=config.dropout,
            recompute=config.activation_checkpointing,
            **{name: getattr(config, name) for name in SHAPE},
        )


def count_parameters(config: Any) -> int:
    return sum(p.numel() for p in build_model(config).parameters())


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give the parameters that `module` itself owns memory on `device`, and initial values."""
    if list(module.parameters(recurse=False)):
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()  # type: ignore[operator]  # what an owner of parameters must have


def decay_groups(parameters: list[nn.Parameter], config: Any) -> list[dict[str, Any]]:
    """`parameters`, or flat shards of them in their order, as AdamW's groups: matrices decay."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay} for decay in (0.0, config.weight_decay)
    ]
    for p, whole in zip(parameters, build_model(config).parameters(), strict=True):
        groups[whole.ndim >= 2]["params"].append(p)
    return groups


def learning_rate(step: int, config: Any) -> float:
    """Rate of step 1..max_steps: linear warm-up, then cosine (Loshchilov & Hutter 2017, eq. 5)."""
    # A pure function of the step: a resumed run has nothing to restore.
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def peak_flops(device_name: str, dtype: torch.dtype | None) -> float:
    """FLOP/s that the device could reach in `dtype`, None for float32; 0 if it is not known."""
    peaks = [peak for part, peak in PEAK_FLOPS.items() if part in f"{device_name},"]
    return peaks[0][dtype is None] if peaks else 0.0
