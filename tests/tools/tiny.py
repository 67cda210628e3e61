"""The hyperparameters of config.yaml, shrunk until a step takes milliseconds."""

import os
from typing import Any

import torch
from determined.common.util import yaml_safe_load

import fsdp_train
from launch import ROOT

TINY: dict[str, Any] = {"global_batch_size": 12, "max_seq_len": 16, "vocab_size": 32, "d_model": 16, "n_heads": 2}
TINY |= {"n_layers": 2, "simulated_size_in_batches": 7, "lr": 1e-2, "warmup_steps": 3, "max_steps": 12}
TINY |= {"reporting_period": 2, "validation_period": 4, "validation_batches": 2, "checkpoint_period": 8}
TINY |= {"amp_dtype": None}


def tiny(**hparams: Any) -> dict[str, Any]:
    """Hyperparameters of a tiny float32 run, with `hparams` in place of some."""
    experiment = yaml_safe_load((ROOT / "config.yaml").read_text())
    return {**experiment["hyperparameters"], "seed": 5, "slots_per_trial": 2, **TINY, **hparams}


def tiny_config(ranks: int = 1, **hparams: Any) -> fsdp_train.Config:
    return fsdp_train.parse_config(tiny(**hparams), ranks)


def tiny_run(ranks: int = 1, local_ranks: int | None = None, **hparams: Any) -> fsdp_train.Run:
    """A Run of this rank on CPU, in the dtype that amp_dtype names (not auto)."""
    config = tiny_config(ranks, **hparams)
    local_ranks = local_ranks or ranks
    amp_dtype = getattr(torch, config.amp_dtype or "", None)
    rank = int(os.environ.get("RANK", 0)) % local_ranks
    return fsdp_train.Run(config, torch.device("cpu"), rank, local_ranks, amp_dtype)


def overrides(**hparams: Any) -> list[str]:
    """`key=value` arguments that make the script's own config.yaml a tiny one."""
    return [f"{key}={'null' if value is None else value}" for key, value in {**TINY, **hparams}.items()]
