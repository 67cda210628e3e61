"""The synthetic data: a cycle of global batches with a known entropy, the same for any number of ranks."""

import dataclasses
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from data import SyntheticTokens, build_data
from tiny import tiny_config

CYCLE = 5


def stream(split: str = "training", rank: int = 0, ranks: int = 1, **hparams: Any) -> SyntheticTokens:
    # replace() checks nothing: what is refused here, the data themselves refuse.
    config = dataclasses.replace(tiny_config(simulated_size_in_batches=CYCLE), **hparams)
    return build_data(config, split, rank, ranks)


def draw(source: SyntheticTokens, batches: int) -> Tensor:
    return torch.stack([next(source) for _ in range(batches)])


def test_repeats_itself_after_each_cycle() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    source = stream()
    cycle = draw(source, CYCLE)
    assert cycle.shape == (CYCLE, 12, 17), "the extra token is the target of the last position"
    assert cycle.dtype == torch.int64
    assert torch.equal(draw(source, 2 * CYCLE), cycle.repeat(2, 1, 1))
    assert torch.equal(draw(stream(simulated_size_in_batches=100), CYCLE), cycle), "the first seeding is as the others"
    assert torch.equal(draw(stream(simulated_size_in_batches=1), 3), cycle[:1].repeat(3, 1, 1))
    assert iter(source) is source
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"


@pytest.mark.parametrize("split", ["training", "validation"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_is_independent_of_the_number_of_ranks(ranks: int, split: str) -> None:
    parts = [draw(stream(split, rank, ranks), 2 * CYCLE) for rank in range(ranks)]
    assert parts[0].shape == (2 * CYCLE, 12 // ranks, 17)
    assert torch.equal(torch.cat(parts, dim=1), draw(stream(split), 2 * CYCLE))


@pytest.mark.parametrize("branching", [1, 4, 15, 16, None])
def test_has_the_entropy_that_it_says(branching: int | None) -> None:
    source = stream(branching=branching, vocab_size=16, max_seq_len=200, global_batch_size=300)
    assert source.entropy == pytest.approx(math.log(branching or 16), abs=1e-12)
    tokens = next(source)
    counts = torch.bincount((tokens[:, :-1] * 16 + tokens[:, 1:]).flatten(), minlength=256)
    pairs = counts.view(16, 16) / counts.sum()  # joint frequencies of a token and the next
    measured = -torch.xlogy(pairs, pairs / pairs.sum(dim=1, keepdim=True)).sum()
    assert measured.item() == pytest.approx(source.entropy, abs=0.005)
    # Uniform: each value within five standard deviations of its share.
    increments = ((tokens.diff(dim=1) - 1) % 16).flatten()
    for values, kinds in ((tokens[:, 0], 16), (increments, branching or 16)):
        counts, share = torch.bincount(values), len(values) / kinds
        assert len(counts) == kinds
        assert (counts - share).abs().max() <= 5 * share**0.5


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("position", [0, 1, CYCLE - 1, CYCLE, CYCLE + 1, 2 * CYCLE, 3 * CYCLE + 2])
@pytest.mark.parametrize("used", [0, 3, CYCLE])
def test_goes_on_where_it_was_saved(position: int, ranks: int, used: int) -> None:
    """By another number of ranks, too, and whatever a stream has drawn before."""
    saved = stream()
    for _ in range(position):
        next(saved)
    state = saved.state_dict()
    assert state == {"position": position, "global_batch_size": 12}
    parts = []
    for rank in range(ranks):
        resumed = stream(rank=rank, ranks=ranks)
        for _ in range(used):
            next(resumed)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        parts.append(draw(resumed, 2 * CYCLE))
    assert torch.equal(torch.cat(parts, dim=1), draw(saved, 2 * CYCLE))


def test_draws_at_most_one_cycle_again() -> None:
    source = stream()
    with patch.object(torch, "randint", wraps=torch.randint) as randint:
        source.load_state_dict({"position": 1000 * CYCLE + 2})
    assert randint.call_count == 2 * 2, "first tokens and increments of two batches"


def test_refuses() -> None:
    """Also a position that was counted in other batches."""
    with pytest.raises(ValueError, match="12 does not divide by the 7 ranks: use 14"):
        stream(ranks=7)
    for branching in (33, 0, -1):
        with pytest.raises(ValueError, match=f"branching = {branching} is not from 1 to vocab_size = 32"):
            stream(branching=branching)
    with pytest.raises(ValueError, match=r"global_batch_size = 6, but 3 batches of 12 .* go on with 12"):
        stream(global_batch_size=6).load_state_dict({"position": 3, "global_batch_size": 12})


def test_training_and_validation_do_not_overlap() -> None:
    rows = []
    for split, cycle in (("training", 40), ("validation", 20)):
        batches = draw(stream(split, simulated_size_in_batches=40, validation_batches=20), cycle + 1)
        assert torch.equal(batches[-1], batches[0]), "each has a cycle of its own"
        rows += batches[:-1].flatten(0, 1).tolist()
    assert len({tuple(row) for row in rows}) == (40 + 20) * 12, "no row occurs twice, in a batch, split or both"


def test_streams_of_neighbouring_seeds_differ() -> None:
    seeds = {stream(split, seed=seed).seed for seed in range(50) for split in ("training", "validation")}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_tokens_are_drawn_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default device; and come in pinned memory where there is a GPU to copy them to."""
    with torch.device("meta"):
        source = stream()
    assert source.generator.device.type == "cpu"
    pinned: list[Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tokens: pinned.append(tokens) or tokens)  # type: ignore[func-returns-value]
    assert next(source) is pinned[0]
