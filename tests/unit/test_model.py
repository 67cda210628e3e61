"""The transformer and its learning rate: where training starts, and what may depend on what."""

import math
from typing import Any

import pytest
import torch

from data import SyntheticTokens
from fsdp_train import next_token_loss
from model import LayerNorm, Transformer, build_model, decay_groups, learning_rate, peak_flops
from tiny import tiny_config

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 32, "max_seq_len": 16, "d_model": 16, "n_heads": 2, "n_layers": 2},
    "two tokens": {"vocab_size": 2, "max_seq_len": 32, "d_model": 8, "n_heads": 1, "n_layers": 1},
    "wide": {"vocab_size": 64, "max_seq_len": 8, "d_model": 1024, "n_heads": 8, "n_layers": 1},
    "wide and two tokens": {"vocab_size": 2, "max_seq_len": 8, "d_model": 1024, "n_heads": 8, "n_layers": 1},
    "narrow and many tokens": {"vocab_size": 20000, "max_seq_len": 16, "d_model": 8, "n_heads": 2, "n_layers": 2},
    "deep": {"vocab_size": 128, "max_seq_len": 16, "d_model": 32, "n_heads": 4, "n_layers": 24},
    "many heads": {"vocab_size": 512, "max_seq_len": 64, "d_model": 64, "n_heads": 64, "n_layers": 2},
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_loss_starts_at_that_of_a_guess(size: str, seed: int) -> None:
    shape = SIZES[size]
    torch.manual_seed(seed)
    model = Transformer(**shape)
    data = SyntheticTokens(
        seed=seed,
        vocab_size=shape["vocab_size"],
        branching=None,
        split="training",
        seq_len=shape["max_seq_len"],
        global_batch_size=64,
        size_in_batches=1,
        rank=0,
        world_size=1,
    )
    with torch.no_grad():
        loss = next_token_loss(model, next(data), None)
    assert loss.item() == pytest.approx(math.log(shape["vocab_size"]), rel=0.05)


def test_no_position_sees_those_after_it() -> None:
    torch.manual_seed(0)
    model = Transformer(**SIZES["tiny"])
    tokens = torch.randint(0, 32, (3, 16))
    with torch.no_grad():
        logits = model(tokens)
        assert logits.shape == (3, 16, 32)
        for position in range(16):
            changed = tokens.clone()
            changed[:, position] = (changed[:, position] + 7) % 32
            differs = (model(changed) - logits).abs().amax(dim=(0, 2)) > 1e-7
            assert not differs[:position].any(), "nothing before the change"
            assert differs[position:].all(), "each position from there on"


def test_positions_matter() -> None:
    """Alone with itself, a token has other logits at another position."""
    torch.manual_seed(0)
    model = Transformer(**SIZES["tiny"])
    with torch.no_grad():
        logits = model(torch.full((1, 16), 5))[0]
    assert len({tuple(row) for row in logits.tolist()}) == 16


def test_a_shorter_sequence_is_a_prefix() -> None:
    torch.manual_seed(0)
    model = Transformer(**SIZES["tiny"])
    tokens = torch.randint(0, 32, (2, 16))
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])


def test_built_on_meta_and_filled_module_by_module() -> None:
    """Each module fills exactly the parameters of its own, and as if the model had been built in memory."""
    config = tiny_config()
    model = build_model(config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert list(model.buffers()) == []

    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(math.nan)
    torch.manual_seed(3)
    filled: set[str] = set()
    for prefix, module in model.named_modules():
        own = {f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)}
        if own:
            module.reset_parameters()
        filled |= own
        assert {name for name, p in model.named_parameters() if not p.isnan().any()} == filled
    assert filled == {name for name, _ in model.named_parameters()}

    torch.manual_seed(3)
    for (name, p), expected in zip(model.named_parameters(), Transformer(**SIZES["tiny"]).parameters(), strict=True):
        assert torch.equal(p, expected), name


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
    torch.manual_seed(0)
    model = Transformer(**SIZES["tiny"], dropout=0.5)
    tokens = torch.randint(0, 32, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"n_heads = 3 does not divide d_model = 16: use (2|4)"):
        Transformer(**{**SIZES["tiny"], "n_heads": 3})
    with pytest.raises(ValueError, match=r"17 tokens .* max_seq_len = 16"):
        Transformer(**SIZES["tiny"])(torch.zeros(1, 17, dtype=torch.long))


def test_normalises_in_float32() -> None:
    """Whatever the dtype of its input and weight, and of autocast."""
    norm = LayerNorm(64, bias=False).to(torch.bfloat16)
    x = (torch.randn(8, 64) * 3 + 100).to(torch.bfloat16)  # in bfloat16 the mean alone would be off by 0.5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.float32
    expected = (x.double() - x.double().mean(-1, True)) / x.double().var(-1, unbiased=False, keepdim=True).sqrt()
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("hparams", "step", "rate"),
    [
        ({}, 1, 0.25),
        ({}, 2, 0.5),
        ({}, 4, 1.0),  # the end of the warm-up
        ({}, 9, 0.55),  # half-way from 4 to 14: the mean of both ends
        ({}, 14, 0.1),  # the last step
        ({"warmup_steps": 0}, 7, 0.55),
        ({"warmup_steps": 0}, 14, 0.1),
        ({"warmup_steps": 1}, 1, 1.0),
        ({"warmup_steps": 14}, 14, 1.0),
        ({"warmup_steps": 28}, 14, 0.5),
        ({"min_lr_ratio": 0}, 14, 0.0),
        ({"min_lr_ratio": 1}, 9, 1.0),
    ],
)
def test_learning_rate(hparams: dict[str, Any], step: int, rate: float) -> None:
    config = tiny_config(**{"lr": 2.0, "warmup_steps": 4, "max_steps": 14, "min_lr_ratio": 0.1, **hparams})
    assert learning_rate(step, config) == pytest.approx(2.0 * rate, abs=1e-12)


def test_learning_rate_rises_then_falls() -> None:
    config = tiny_config(warmup_steps=0, max_steps=14)
    rates = [learning_rate(step, config) for step in range(1, 15)]
    assert rates == sorted(rates, reverse=True)
    assert config.lr * 0.95 < rates[0] < config.lr, "the first step is of a run, too"
    config = tiny_config(warmup_steps=4, max_steps=14)
    rates = [learning_rate(step, config) for step in range(1, 15)]
    assert max(rates) == rates[3] == config.lr
    assert all(rate > 0 for rate in rates)


def test_only_matrices_decay() -> None:
    config = tiny_config(weight_decay=0.3)
    model = Transformer(**SIZES["tiny"])
    others, matrices = decay_groups(list(model.parameters()), config)
    assert (others["weight_decay"], matrices["weight_decay"]) == (0.0, 0.3)
    assert len(others["params"]) == 5 and all(p.ndim == 1 for p in others["params"])
    assert len(matrices["params"]) == 11 and all(p.ndim == 2 for p in matrices["params"])


def test_recomputing_is_exact() -> None:
    """Values, gradients and dropout masks are those of a block that keeps its activations."""
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Transformer(**SIZES["tiny"], dropout=0.3, recompute=recompute)
        torch.manual_seed(1)
        model(torch.arange(16)[None]).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


def test_flops_per_token() -> None:
    """6 N + 12 L T C, computed by hand for 7504 parameters, 2 blocks, 16 tokens, width 16."""
    assert Transformer(**SIZES["tiny"]).flops_per_token() == 6 * 7504 + 12 * 2 * 16 * 16


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB, compute capability 8.0", (312e12, 19.5e12)),
        ("NVIDIA A10, compute capability 8.6", (125e12, 31.2e12)),
        ("NVIDIA H100 80GB HBM3, compute capability 9.0", (989e12, 67e12)),
        ("NVIDIA H200, compute capability 9.0", (989e12, 67e12)),
        ("Tesla T4, compute capability 7.5", (65e12, 8.1e12)),
        ("Tesla V100-SXM2-16GB, compute capability 7.0", (125e12, 15.7e12)),
        ("NVIDIA A10G, compute capability 8.6", (0, 0)),
        ("NVIDIA H100 PCIe, compute capability 9.0", (0, 0)),
        ("CPU that multiplies bfloat16", (0, 0)),
    ],
)
def test_peak_flops(name: str, peak: tuple[float, float]) -> None:
    assert (peak_flops(name, torch.float16), peak_flops(name, None)) == peak
