"""Seeded synthetic token sequences with a known entropy: a loss on them cannot lie.

A sequence starts with a uniform token; each next token is (current + increment) mod vocab_size,
with the increment uniform in 1..branching. A model that has learned this has a loss of
ln(branching) nats per token on sequences that it never saw, and no honest model has less. Training
losses can go below: the stream repeats, and a model can memorise it.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


class SyntheticTokens:
    """Endless iterator over this rank's rows of `size_in_batches` global batches, repeated.

    `next()` gives int64 tokens of shape (global_batch_size / world_size, seq_len + 1); the extra
    token is the target of the last position. Every rank draws the whole global batch from the same
    seed, on the CPU, and keeps its own rows: what the model sees depends neither on the number of
    ranks nor on the hardware. `state_dict()` and `load_state_dict()` are those of torchdata's
    StatefulDataLoader.

    Args:
        seed: integer in [0, 2^32); the same on all ranks.
        split: "training" or "validation", which have no sequence in common.
        branching: possible next tokens, 1..vocab_size; None makes the tokens uniform noise.
        size_in_batches: global batches before the generator reseeds itself, to the same seed.

    Raises:
        ValueError: global_batch_size is not a multiple of world_size, or branching is out of range.
    """

    def __init__(
        self,
        *,
        seed: int,
        split: str,
        vocab_size: int,
        branching: int | None,
        seq_len: int,
        global_batch_size: int,
        size_in_batches: int,
        rank: int,
        world_size: int,
    ) -> None:
        # Uniform noise is the case where every token may follow every other.
        self.branching = vocab_size if branching is None else branching
        problems = []
        if global_batch_size % world_size:
            fits = max(round(global_batch_size / world_size), 1) * world_size
            problems.append(
                f"global_batch_size = {global_batch_size} does not divide by the {world_size} "
                f"ranks: use {fits}"
            )
        if not 1 <= self.branching <= vocab_size:
            problems.append(f"branching = {branching} is not from 1 to vocab_size = {vocab_size}")
        if problems:
            raise ValueError("; ".join(problems))
        seeds = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        self.seed = int(seeds[("training", "validation").index(split)]) >> 1  # below 2^63
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.size_in_batches = size_in_batches
        rows = global_batch_size // world_size
        self.rows = slice(rank * rows, (rank + 1) * rows)
        self.generator = torch.Generator()
        self.position = 0  # global batches drawn since the start

    @property
    def entropy(self) -> float:
        """Nats per token after the first, ln(branching): the lowest honest validation loss."""
        return math.log(self.branching)

    def __iter__(self) -> "SyntheticTokens":
        return self

    def __next__(self) -> Tensor:
        if self.position % self.size_in_batches == 0:
            self.generator.manual_seed(self.seed)
        self.position += 1
        draw = functools.partial(torch.randint, generator=self.generator)
        first = draw(0, self.vocab_size, (self.global_batch_size, 1))
        increments = draw(1, self.branching + 1, (self.global_batch_size, self.seq_len))
        tokens = torch.cat((first, increments), dim=1)[self.rows].cumsum(dim=1) % self.vocab_size
        # From pinned memory a copy to the GPU does not wait for the GPU's work before it.
        return tokens.pin_memory() if torch.cuda.is_available() else tokens

    def state_dict(self) -> dict[str, int]:
        """Position in global batches of a size: valid for any number of ranks."""
        return {"position": self.position, "global_batch_size": self.global_batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the batch after `state["position"]`; costs at most one cycle of draws.

        Raises ValueError if it was counted in batches of another size.
        """
        size = state.get("global_batch_size", self.global_batch_size)
        if size != self.global_batch_size:
            raise ValueError(
                f"global_batch_size = {self.global_batch_size}, but {state['position']} batches of "
                f"{size} were drawn: go on with {size}"
            )
        replay = state["position"] % self.size_in_batches
        self.position = state["position"] - replay
        for _ in range(replay):
            next(self)


def build_data(config: Any, split: str, rank: int, ranks: int) -> SyntheticTokens:
    """The "training" or "validation" data of a Config, for one of `ranks` ranks.

    Raises ValueError for hyperparameters that do not fit.
    """
    sizes = {
        "training": config.simulated_size_in_batches,
        "validation": config.validation_batches,
    }
    return SyntheticTokens(
        seed=config.seed,
        split=split,
        size_in_batches=sizes[split],
        vocab_size=config.vocab_size,
        branching=config.branching,
        seq_len=config.max_seq_len,
        global_batch_size=config.global_batch_size,
        rank=rank,
        world_size=ranks,
    )
