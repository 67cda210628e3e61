"""Hyperparameters: what the YAML files and the command line may say, and what is answered to what they may not."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from determined.common.util import yaml_safe_load

from fsdp_train import Config, Refusal, parse_config
from launch import ROOT, run
from tiny import tiny, tiny_config


@pytest.mark.parametrize("name", ["config.yaml", "distributed.yaml"])
def test_every_field_is_a_key_and_every_key_a_field(name: str) -> None:
    experiment = yaml_safe_load((ROOT / name).read_text())
    given = experiment["hyperparameters"] | {"seed": experiment["reproducibility"]["experiment_seed"]}
    given["slots_per_trial"] = experiment["resources"]["slots_per_trial"]
    assert set(given) == {field.name for field in dataclasses.fields(Config)}
    assert dataclasses.asdict(parse_config(given, experiment["resources"]["slots_per_trial"])) == given


TAKEN: dict[str, list[tuple[Any, Any]]] = {
    "lr": [(1, 1.0), (10000, 10000.0), ("1e-4", 1e-4)],  # what the master makes of 1.0 and 1e4, and PyYAML of 1e-4
    "weight_decay": [(0, 0.0)],
    "min_lr_ratio": [(0, 0.0), (1, 1.0)],
    "max_steps": [(8.0, 8), (1e3, 1000), (1_000_000_000, 1_000_000_000)],
    "warmup_steps": [(0, 0)],
    "micro_batch_size": [(None, None), (5.0, 5)],  # need not divide anything
    "branching": [(None, None), (32, 32)],  # all of the vocabulary
    "amp_dtype": [(None, None), ("auto", "auto")],
    "compile": [(True, True)],
    "seed": [(2**32 - 1, 2**32 - 1)],
}


def test_takes() -> None:
    for name, values in TAKEN.items():
        for given, taken in values:
            value = getattr(tiny_config(4, **{name: given}), name)
            assert value == taken and type(value) is type(taken), f"{name}: {given!r} became {value!r}"


REFUSED: list[tuple[str, list[Any], str]] = [
    ("lr", [True, 0, -1e-3, None, math.nan, math.inf, "fast", [1e-3], 1e31], "must be float from 1e-30 to 1e+30"),
    ("lr", [{"type": "log", "minval": -4, "maxval": -2, "base": 10}], "use lr=VALUE"),
    ("weight_decay", [-1], "must be float from 0 to"),
    ("dropout", [1, -0.1], "must be float from 0 to 0.99"),
    ("min_lr_ratio", [1.1], "must be float from 0 to 1"),
    ("max_steps", [True, 8.5, 0, None, 10**400, 2**63 - 1, 10**9 + 1], "must be int from 1 to 1000000000"),
    ("warmup_steps", [-1, 2**63 - 1], "must be int from 0 to 1000000000"),
    ("n_layers", [0, 2**63 - 1], "must be int from 1 to 1000000"),
    ("micro_batch_size", [0, "null", 2**63 - 1], "must be null or int from 1 to 1000000"),
    ("branching", [False], "must be null or int from 1 to 1000000"),
    ("amp_dtype", ["bf16", "None", False], 'must be one of ["auto", "bfloat16", "float16", null]'),
    ("reduce_dtype", ["bfloat16"], 'must be one of ["float32", null]'),
    ("sharding", [None, ["full"]], 'must be one of ["full", "hybrid"]'),
    ("compile", [1, "true", None], "must be one of [true, false]"),
    ("seed", [-1, 2**32, None, 1.5], "must be int from 0 to 4294967295"),
]


def test_refuses() -> None:
    """The message has the key, the value and what to write."""
    for name, values, instead in REFUSED:
        for given in values:
            with pytest.raises(Refusal) as error:
                tiny_config(**{name: given})
            _, problem = str(error.value).splitlines()
            assert problem.startswith(f"  {name} = {given}: ") and instead in problem, error.value


def test_reports_all_problems_together() -> None:
    hparams = tiny(learning_rte=1.0, dmodel=16, lr="fast", max_steps=8.5, global_batch_size=13, n_heads=3)
    del hparams["weight_decay"]
    with pytest.raises(Refusal) as error:
        parse_config(hparams, 2)
    text = str(error.value)
    for part in ("learning_rte: no such", "dmodel: no such", "weight_decay = missing", "lr = fast", "max_steps = 8.5"):
        assert text.count(part) == 1, f"{part}:\n{text}"
    assert "global_batch_size = 13 does not divide by the 2 ranks: use 12" in text, "also what does not fit"
    assert "n_heads = 3 does not divide d_model = 16: use 2" in text
    assert len(text.splitlines()) == 8
    with pytest.raises(Refusal, match="vocab_size = None"):
        tiny_config(2, vocab_size=None, global_batch_size=3)  # without it no model can be built


DEFAULT = (ROOT / "config.yaml").read_text()
# By name: config.yaml, the arguments, and what the message has.
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "no file": (DEFAULT, ["--config", "absent.yaml"], ["--config absent.yaml", "No such file"]),
    "not YAML": ("a: [1", [], ["--config config.yaml", "must be an experiment config"]),
    "no hyperparameters": (DEFAULT.replace("hyperparameters:", "h:"), [], ["config.yaml", "hyperparameters"]),
    "no seed": (DEFAULT.replace("experiment_seed: 1", ""), [], ["config.yaml", "experiment_seed"]),
    "unknown": (DEFAULT, ["zzz=1", "global_batch_size=0.5"], ["zzz: no such", "global_batch_size = 0.5"]),
    "no key=value": (DEFAULT, ["max_steps", "10"], ["'max_steps'", "key=value"]),
    "slots": (DEFAULT, ["--dry-run", "slots_per_trial=0"], ["slots_per_trial = 0: must be int from 1"]),
    "slots do not divide": (DEFAULT, ["--dry-run", "slots_per_trial=3"], ["the 3 ranks", "use 15"]),
}


def test_command_line_refuses(tmp_path: Path) -> None:
    for name, (content, arguments, says) in CASES.items():
        (tmp_path / "config.yaml").write_text(content)
        outcome = run(*arguments, ranks=0, cwd=tmp_path)
        assert outcome.code == 1, f"{name}: {outcome.text}"
        assert outcome.text.count("fsdp_train.py: ") == 1 and "Traceback" not in outcome.text, f"{name}: {outcome.text}"
        assert all(part in outcome.text for part in says), f"{name}: {outcome.text}"
        assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], f"{name}: nothing is left"
