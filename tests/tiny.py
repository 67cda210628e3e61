"""The hyperparameters of config.yaml, shrunk until a step takes milliseconds."""

from typing import Any

from determined.common.util import yaml_safe_load
from launch import ROOT

import fsdp_train

TINY = {
    "global_batch_size": 12,
    "max_seq_len": 16,
    "vocab_size": 32,
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 2,
    "simulated_size_in_batches": 7,
    "lr": 1e-2,
    "warmup_steps": 3,
    "max_steps": 12,
    "reporting_period": 2,
    "validation_period": 4,
    "validation_batches": 2,
    "checkpoint_period": 8,
    "amp_dtype": None,
}


def tiny(**hparams: Any) -> dict[str, Any]:
    """Hyperparameters of a tiny float32 run, with `hparams` in place of some."""
    return {**yaml_safe_load((ROOT / "config.yaml").read_text())["hyperparameters"], **TINY, **hparams}


def tiny_config(ranks: int = 1, **hparams: Any) -> fsdp_train.Config:
    return fsdp_train.parse_config(tiny(**hparams), ranks, ranks)


def overrides(**hparams: Any) -> list[str]:
    """`key=value` arguments that make the script's own config.yaml a tiny one."""
    return [f"{key}={'null' if value is None else value}" for key, value in {**TINY, **hparams}.items()]
