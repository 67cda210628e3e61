"""The transformer and its learning rate: where training starts, and what may depend on what."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from data import build_data
from fsdp_train import next_token_loss
from model import Transformer, build_model, decay_groups, learning_rate, peak_flops
from tiny import tiny_config

TINY: dict[str, Any] = {"vocab_size": 32, "max_seq_len": 16, "d_model": 16, "n_heads": 2, "n_layers": 2}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "two tokens": {"vocab_size": 2, "max_seq_len": 32, "d_model": 8, "n_heads": 1, "n_layers": 1},
    "wide and two tokens": {"vocab_size": 2, "max_seq_len": 8, "d_model": 1024, "n_heads": 8, "n_layers": 1},
    "narrow and many tokens": {"vocab_size": 20000, "max_seq_len": 16, "d_model": 8, "n_heads": 2, "n_layers": 2},
}


def tiny_model(**options: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**TINY, **options)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_loss_starts_at_that_of_a_guess(size: str, seed: int) -> None:
    shape = SIZES[size]
    torch.manual_seed(seed)
    model = Transformer(**shape)
    noise = build_data(tiny_config(branching=None, global_batch_size=64, seed=seed, **shape), "training", 0, 1)
    with torch.no_grad():
        loss = next_token_loss(model, next(noise), None)
    assert loss.item() == pytest.approx(math.log(shape["vocab_size"]), rel=0.05)


@torch.no_grad()
def test_each_position_sees_itself_and_those_before() -> None:
    model = tiny_model()
    tokens = torch.randint(0, 32, (3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, 32)
    for position in range(16):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 7) % 32
        differs = (model(changed) - logits).abs().amax(dim=(0, 2)) > 1e-7
        assert not differs[:position].any(), "nothing before the change"
        assert differs[position:].all(), "each position from there on"
    torch.testing.assert_close(model(tokens[:, :5]), logits[:, :5])
    of_one_token = model(torch.full((1, 16), 5))[0]
    assert len({tuple(row) for row in of_one_token.tolist()}) == 16, "its place matters, too"
    with pytest.raises(ValueError, match=r"17 tokens .* max_seq_len = 16"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = Transformer(vocab_size=300, max_seq_len=200, d_model=256, n_heads=4, n_layers=8)
    stds = {"token": 0.02, "position": 0.02, "qkv": 0.02, "mlp_in": 0.02, "out": 0.1 / 16}
    stds |= dict.fromkeys(("attention_out", "mlp_out"), 0.02 / 4)  # sqrt(2 * 8 layers)
    for name, p in model.named_parameters():
        if "norm" in name:
            assert torch.equal(p, torch.ones(256)), name
        else:
            owner = name.removesuffix(".weight").split(".")[-1]
            assert p.std().item() == pytest.approx(stds[owner], rel=0.02), name
            assert abs(p.mean().item()) < 4 * stds[owner] / p.numel() ** 0.5, name


def test_dropout_only_in_training() -> None:
    model = tiny_model(dropout=0.5)
    tokens = torch.randint(0, 32, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_recomputes_each_block_in_backward() -> None:
    for recompute, calls in ((False, 2), (True, 4)):
        model = tiny_model(recompute=recompute)
        with patch.object(F, "gelu", wraps=F.gelu) as gelu:
            model(torch.arange(16)[None]).sum().backward()
        assert gelu.call_count == calls, "each of the two blocks once, or once more"
    assert all(block.recompute for block in build_model(tiny_config(activation_checkpointing=True)).blocks)


def test_learning_rate() -> None:
    """Of 14 steps: the end of the warm-up, the mean of both ends half-way to the last step, the last step."""
    cases: list[tuple[dict[str, Any], dict[int, float]]] = [
        ({}, {1: 0.25, 2: 0.5, 4: 1.0, 9: 0.55, 14: 0.1}),
        ({"warmup_steps": 0}, {7: 0.55, 14: 0.1}),
        ({"warmup_steps": 1}, {1: 1.0}),
        ({"warmup_steps": 14}, {14: 1.0}),
        ({"warmup_steps": 28}, {14: 0.5}),
        ({"min_lr_ratio": 0}, {14: 0.0}),
        ({"min_lr_ratio": 1}, {9: 1.0}),
    ]
    for hparams, rates in cases:
        config = tiny_config(**{"lr": 2.0, "warmup_steps": 4, "max_steps": 14, "min_lr_ratio": 0.1, **hparams})
        measured = {step: learning_rate(step, config) / 2.0 for step in rates}
        assert measured == pytest.approx(rates, abs=1e-12), hparams


def test_only_matrices_decay() -> None:
    others, matrices = decay_groups(list(tiny_model().parameters()), tiny_config(weight_decay=0.3))
    assert (others["weight_decay"], matrices["weight_decay"]) == (0.0, 0.3)
    assert [p.ndim for p in others["params"]] == [1] * 5
    assert [p.ndim for p in matrices["params"]] == [2] * 11


def test_peak_flops() -> None:
    for name, peaks in {
        "NVIDIA A100-SXM4-80GB, compute capability 8.0": (312e12, 19.5e12),
        "NVIDIA A10, compute capability 8.6": (125e12, 31.2e12),
        "NVIDIA A10G, compute capability 8.6": (0, 0),
        "NVIDIA H100 80GB HBM3, compute capability 9.0": (989e12, 67e12),
        "NVIDIA H100 PCIe, compute capability 9.0": (0, 0),
        "Tesla T4, compute capability 7.5": (65e12, 8.1e12),
        "CPU that multiplies bfloat16": (0, 0),
    }.items():
        assert (peak_flops(name, torch.float16), peak_flops(name, None)) == peaks, name
