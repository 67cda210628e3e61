"""The synthetic data: a cycle of global batches with a known entropy, the same for any number of ranks."""

import inspect
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from data import SyntheticTokens, build_data
from fsdp_train import Config
from tiny import tiny_config

CYCLE = 5


def stream(**arguments: Any) -> SyntheticTokens:
    defaults = {
        "seed": 11,
        "split": "training",
        "vocab_size": 16,
        "branching": 4,
        "seq_len": 9,
        "global_batch_size": 12,
        "size_in_batches": CYCLE,
        "rank": 0,
        "world_size": 1,
    }
    return SyntheticTokens(**{**defaults, **arguments})


def draw(source: SyntheticTokens, batches: int) -> list[Tensor]:
    return [next(source) for _ in range(batches)]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def conditional_entropy(tokens: Tensor) -> float:
    """Empirical entropy in nats of a token given the one before it."""
    pairs = Counter(zip(tokens[:, :-1].flatten().tolist(), tokens[:, 1:].flatten().tolist(), strict=True))
    firsts: Counter[int] = Counter()
    for (first, _), count in pairs.items():
        firsts[first] += count
    return -sum(n / pairs.total() * math.log(n / firsts[first]) for (first, _), n in pairs.items())


def test_batches() -> None:
    batch = next(stream())
    assert batch.shape == (12, 10), "the extra token is the target of the last position"
    assert batch.dtype == torch.int64
    assert iter(source := stream()) is source


def test_repeats_itself_after_each_cycle() -> None:
    batches = draw(stream(), 3 * CYCLE)
    cycle = batches[:CYCLE]
    assert same(batches, cycle * 3)
    assert len({tuple(batch.flatten().tolist()) for batch in cycle}) == CYCLE, "no batch twice within a cycle"
    assert same(draw(stream(size_in_batches=100), CYCLE), cycle), "the first seeding is like every other"
    assert same(draw(stream(size_in_batches=1), 3), [cycle[0]] * 3)


def test_another_seed_is_other_data() -> None:
    assert not torch.equal(next(stream(seed=1)), next(stream(seed=2)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_is_independent_of_the_number_of_ranks(ranks: int) -> None:
    parts = [draw(stream(rank=rank, world_size=ranks), 2 * CYCLE) for rank in range(ranks)]
    assert parts[0][0].shape == (12 // ranks, 10)
    assert same([torch.cat(rows) for rows in zip(*parts, strict=True)], draw(stream(), 2 * CYCLE))


@pytest.mark.parametrize("branching", [1, 4, 15, 16, None])
def test_has_the_entropy_that_it_says(branching: int | None) -> None:
    source = stream(branching=branching, seq_len=200, global_batch_size=300)
    tokens = next(source)
    increments = Counter((tokens.diff(dim=1) % 16).flatten().tolist())
    assert set(increments) == {n % 16 for n in range(1, (branching or 16) + 1)}
    assert source.entropy == pytest.approx(math.log(branching or 16), abs=1e-12)
    assert conditional_entropy(tokens) == pytest.approx(source.entropy, abs=0.005)
    # Each within five standard deviations of a uniform draw.
    for counts, kinds in ((increments, branching or 16), (Counter(tokens[:, 0].tolist()), 16)):
        expected = counts.total() / kinds
        assert len(counts) == kinds
        assert all(abs(count - expected) <= 5 * expected**0.5 for count in counts.values())


def test_sequences_differ_within_a_batch() -> None:
    rows = next(stream(branching=16)).tolist()
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("position", [0, 1, CYCLE - 1, CYCLE, CYCLE + 1, 2 * CYCLE, 3 * CYCLE + 2])
@pytest.mark.parametrize("used", [0, 3, CYCLE])
def test_goes_on_where_it_was_saved(position: int, world_size: int, used: int) -> None:
    """By another number of ranks, too, and whatever the stream had drawn before."""
    saved = stream()
    draw(saved, position)
    state = saved.state_dict()
    assert state == {"position": position, "global_batch_size": 12}
    rest = draw(saved, 2 * CYCLE)
    parts = []
    for rank in range(world_size):
        resumed = stream(rank=rank, world_size=world_size)
        draw(resumed, used)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        parts.append(draw(resumed, 2 * CYCLE))
    assert same([torch.cat(rows) for rows in zip(*parts, strict=True)], rest)


class SpiedGenerator(torch.Generator):
    """A generator that remembers its seeds, and from where they came."""

    def manual_seed(self, seed: int) -> torch.Generator:
        caller = inspect.stack()[1]
        SEEDINGS.append((seed, f"{caller.function}:{caller.lineno}"))
        return super().manual_seed(seed)


SEEDINGS: list[tuple[int, str]] = []


def test_seeds_once_per_cycle_from_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Generator", SpiedGenerator)
    SEEDINGS.clear()
    source = stream()
    counts = []
    for _ in range(2 * CYCLE + 1):
        next(source)
        counts.append(len(SEEDINGS))
    assert counts == [1] * CYCLE + [2] * CYCLE + [3]
    source.load_state_dict({"position": 1000 * CYCLE})
    assert len(SEEDINGS) == 3, "nothing to draw again at the end of a cycle"
    source.load_state_dict({"position": 1000 * CYCLE + 2})
    assert len(SEEDINGS) == 4, "at most one cycle to draw again"
    next(source)
    assert len(SEEDINGS) == 4
    assert {seed for seed, _ in SEEDINGS} == {source.seed}
    assert len({place for _, place in SEEDINGS}) == 1, SEEDINGS


def test_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draw(stream(), CYCLE + 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({"world_size": 5}, ["12", "5"]),
        ({"branching": 17}, ["17", "16"]),
        ({"branching": 0}, ["0", "16"]),
        ({"branching": -1}, ["-1", "16"]),
    ],
)
def test_refuses(arguments: dict[str, int], numbers: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        stream(**arguments)
    assert all(number in str(error.value) for number in numbers)


def both(config: Config, rank: int = 0, ranks: int = 1) -> list[SyntheticTokens]:
    return [build_data(config, split, rank, ranks) for split in ("training", "validation")]


def test_training_and_validation_do_not_overlap() -> None:
    config = tiny_config(vocab_size=64, max_seq_len=32, simulated_size_in_batches=40, validation_batches=20)
    training, validation = both(config)
    seen = {tuple(row) for batch in draw(training, 40) for row in batch.tolist()}
    unseen = {tuple(row) for batch in draw(validation, 20) for row in batch.tolist()}
    assert len(seen) == 40 * 12 and len(unseen) == 20 * 12
    assert not seen & unseen
    assert training.seed != validation.seed
    for stream_of, cycle in ((training, 40), (validation, 20)):
        assert same(draw(stream_of, cycle), draw(both(config)[cycle == 20], cycle)), "a cycle is the configured one"


def test_streams_of_neighbouring_seeds_differ() -> None:
    seeds = [source.seed for seed in range(50) for source in both(tiny_config(seed=seed))]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_ranks_share_the_validation_data() -> None:
    parts = [next(both(tiny_config(ranks=2), rank, 2)[1]) for rank in range(2)]
    assert torch.equal(torch.cat(parts), next(both(tiny_config())[1]))


def test_another_batch_size_does_not_go_on_somewhere_else() -> None:
    source = stream()
    draw(source, 3)
    with pytest.raises(ValueError, match=r"global_batch_size = 6, but 3 batches of 12 .* go on with 12"):
        stream(global_batch_size=6).load_state_dict(source.state_dict())


def test_tokens_are_drawn_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default device; and come in pinned memory where there is a GPU to copy them to."""
    with torch.device("meta"):
        source = stream()
    assert source.generator.device.type == "cpu"
    pinned: list[Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tokens: pinned.append(tokens) or tokens)  # type: ignore[func-returns-value]
    assert next(source) is pinned[0]
