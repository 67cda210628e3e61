"""Hyperparameters: what the YAML files and the command line may say, and what is answered to what they may not."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import determined as det
import pytest
from determined.common.util import yaml_safe_load
from launch import ROOT, Outcome, run
from tiny import tiny, tiny_config

from fsdp_train import Config, ConfigError, parse_config

# ---- The YAML files ----


@pytest.mark.parametrize("name", ["config.yaml", "distributed.yaml"])
def test_every_field_is_a_key_and_every_key_a_field(name: str) -> None:
    experiment = yaml_safe_load((ROOT / name).read_text())
    assert set(experiment["hyperparameters"]) == {field.name for field in dataclasses.fields(Config)}
    slots = experiment["resources"]["slots_per_trial"]
    config = parse_config(experiment["hyperparameters"], slots, min(slots, 8))
    assert dataclasses.asdict(config) == experiment["hyperparameters"]


def test_config_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().lr = 1.0  # type: ignore[misc]


# ---- Values ----


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("lr", 1, 1.0),  # what the master makes of 1.0
        ("lr", 10000, 10000.0),  # and of 1e4
        ("lr", "1e-4", 1e-4),  # what PyYAML makes of 1e-4
        ("weight_decay", 0, 0.0),
        ("dropout", 0, 0.0),
        ("min_lr_ratio", 1, 1.0),
        ("max_steps", 8.0, 8),
        ("max_steps", 1e3, 1000),
        ("warmup_steps", 0, 0),
        ("micro_batch_size", None, None),
        ("micro_batch_size", 3.0, 3),
        ("branching", None, None),
        ("branching", {"type": "const", "val": 5}, 5),
        ("amp_dtype", None, None),
        ("amp_dtype", "auto", "auto"),
        ("amp_dtype", "bfloat16", "bfloat16"),
        ("amp_dtype", "float16", "float16"),
        ("reduce_dtype", None, None),
        ("reduce_dtype", "float32", "float32"),
        ("sharding", "hybrid", "hybrid"),
        ("compile", True, True),
        ("activation_checkpointing", False, False),
    ],
)
def test_takes(name: str, given: Any, taken: Any) -> None:
    value = getattr(tiny_config(**{name: given}), name)
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("name", "given", "instead"),
    [
        ("lr", True, "a number from 1e-30 to 1e+30"),
        ("lr", 0, "a number from 1e-30 to 1e+30"),
        ("lr", -1e-3, "a number from 1e-30 to 1e+30"),
        ("lr", None, "a number from 1e-30 to 1e+30"),
        ("lr", math.nan, "a number from 1e-30 to 1e+30"),
        ("lr", math.inf, "a number from 1e-30 to 1e+30"),
        ("lr", "fast", "a number from 1e-30 to 1e+30"),
        ("lr", [1e-3], "a number from 1e-30 to 1e+30"),
        ("lr", 1e31, "a number from 1e-30 to 1e+30"),
        ("max_grad_norm", 0, "a number > 0"),
        ("weight_decay", -1, "a number >= 0"),
        ("dropout", 1, "a number from 0 to 0.99"),
        ("dropout", -0.1, "a number from 0 to 0.99"),
        ("min_lr_ratio", 1.1, "a number from 0 to 1"),
        ("max_steps", True, "a whole number >= 1"),
        ("max_steps", 8.5, "a whole number >= 1"),
        ("max_steps", 0, "a whole number >= 1"),
        ("max_steps", None, "a whole number >= 1"),
        pytest.param("max_steps", 10**400, "a whole number >= 1", id="max_steps-more than a float holds"),
        ("warmup_steps", -1, "a whole number >= 0"),
        ("micro_batch_size", 0, "a whole number >= 1 or null"),
        ("micro_batch_size", "null", "a whole number >= 1 or null"),
        ("branching", False, "a whole number >= 1 or null"),
        ("amp_dtype", "bf16", '"auto", "bfloat16", "float16", null'),
        ("amp_dtype", "None", '"auto", "bfloat16", "float16", null'),
        ("amp_dtype", False, '"auto", "bfloat16", "float16", null'),
        ("reduce_dtype", "bfloat16", '"float32", null'),
        ("sharding", None, '"full", "hybrid"'),
        ("sharding", ["full"], '"full", "hybrid"'),
        ("compile", 1, "true, false"),
        ("compile", "true", "true, false"),
        ("compile", None, "true, false"),
    ],
)
def test_refuses(name: str, given: Any, instead: str) -> None:
    """The message has the key, the value and what to write."""
    with pytest.raises(ConfigError) as error:
        tiny_config(**{name: given})
    assert f"{name} = {given!r}: must be " in str(error.value)
    assert str(error.value).endswith(instead)


@pytest.mark.parametrize(
    ("hparams", "says"),
    [
        ({"global_batch_size": 10}, ["global_batch_size = 10", "the 4 ranks", "use 8 or 12"]),
        ({"global_batch_size": 2}, ["global_batch_size = 2", "the 4 ranks", "use 4"]),
        ({"global_batch_size": 48, "micro_batch_size": 5}, ["micro_batch_size = 5", "12 sequences", "use 4 or 6"]),
        ({"global_batch_size": 12, "micro_batch_size": 4}, ["micro_batch_size = 4", "3 sequences", "use 3"]),
        ({"d_model": 16, "n_heads": 3}, ["n_heads = 3", "d_model = 16", "use 2 or 4"]),
        ({"d_model": 16, "n_heads": 32}, ["n_heads = 32", "d_model = 16", "use 16"]),
        ({"branching": 33}, ["branching = 33", "vocab_size = 32"]),
        ({"sharding": "hybrid", "local_ranks": 1}, ["sharding = hybrid", "use full"]),
    ],
)
def test_refuses_a_combination(hparams: dict[str, Any], says: list[str]) -> None:
    """As InvalidHP: a search may draw another one."""
    local_ranks = hparams.pop("local_ranks", 4)
    with pytest.raises(det.InvalidHP) as error:
        parse_config(tiny(**hparams), 4, local_ranks)
    message = str(error.value)
    assert len(message.splitlines()) == 2, "only one problem, under a heading"
    assert all(part in message for part in says), message
    assert not message.endswith("or "), "no half of a suggestion"


@pytest.mark.parametrize(
    "hparams", [{"branching": 32}, {"micro_batch_size": 3}, {"sharding": "hybrid"}, {"n_heads": 16}]
)
def test_takes_a_combination_at_the_limit(hparams: dict[str, Any]) -> None:
    parse_config(tiny(**hparams), 4, 2)


def test_reports_all_problems_together() -> None:
    hparams = tiny(learning_rte=1.0, dmodel=16, lr="fast", max_steps=8.5, global_batch_size=13, n_heads=3)
    del hparams["weight_decay"], hparams["d_model"]
    with pytest.raises(ConfigError) as error:
        parse_config(hparams, 2, 2)
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert len(lines) == 8, lines
    assert "dmodel: no such hyperparameter; did you mean d_model?" in lines
    assert any(line.startswith("learning_rte: no such hyperparameter") for line in lines)
    assert {"weight_decay: missing", "d_model: missing"} <= set(lines)
    assert any(line.startswith("lr = 'fast'") for line in lines)
    assert any(line.startswith("max_steps = 8.5") for line in lines)
    assert any(line.startswith("global_batch_size = 13") for line in lines), "also what does not fit together"
    assert not any("n_heads" in line for line in lines), "nothing about what cannot be judged"


def test_reports_all_combinations_together() -> None:
    with pytest.raises(det.InvalidHP) as error:
        tiny_config(ranks=5, n_heads=3, branching=99)
    names = [line.split()[0] for line in str(error.value).splitlines()[1:]]
    assert names == ["global_batch_size", "n_heads", "branching"]


@pytest.mark.parametrize(
    ("key", "suggestion"), [("max_step", "max_steps"), ("amp_dtpye", "amp_dtype"), ("zzz", None), (7, None)]
)
def test_suggests_the_nearest_name(key: Any, suggestion: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**tiny(), key: 1}, 1, 1)
    assert f"{key}: no such hyperparameter" in str(error.value)
    assert str(error.value).endswith(f"did you mean {suggestion}?" if suggestion else "no such hyperparameter")


# ---- The command line ----

DEFAULT = (ROOT / "config.yaml").read_text()
WITHOUT_HPARAMS = DEFAULT.partition("hyperparameters:")[0]
SEARCH = "{type: log, minval: -4, maxval: -2, base: 10}"

# By name: the content of config.yaml (None: no file), the arguments, and what the message has.
CASES: dict[str, tuple[str | bytes | None, list[str], list[str]]] = {
    "no file": (None, [], ["config.yaml", "No such file"]),
    "no such file": (DEFAULT, ["--config", "conf.yaml"], ["conf.yaml", "No such file"]),
    "a directory": (DEFAULT, ["--config", "."], ["--config", "directory"]),
    "empty": ("", [], ["config.yaml", "no `hyperparameters:` section"]),
    "a list": ("- 1\n- 2\n", [], ["config.yaml", "no `hyperparameters:` section"]),
    "not YAML": ("hyperparameters: {lr: [1\n", [], ["config.yaml", "cannot be read"]),
    "no such date": (DEFAULT + "\nlabel: 2024-99-99\n", [], ["config.yaml", "cannot be read"]),
    "binary": (bytes(range(256)), [], ["config.yaml", "cannot be read"]),
    "no hyperparameters": (WITHOUT_HPARAMS, [], ["config.yaml", "no `hyperparameters:` section"]),
    "hyperparameters without keys": (WITHOUT_HPARAMS + "hyperparameters:\n", [], ["no `hyperparameters:` section"]),
    "no seed": (DEFAULT.replace("experiment_seed: 1", ""), [], ["config.yaml", "experiment_seed = None", "2^32 - 1"]),
    "seed not in a section": (
        DEFAULT.replace("reproducibility:\n  experiment_seed: 1", "reproducibility: 1"),
        [],
        ["config.yaml", "experiment_seed", "2^32 - 1"],
    ),
    "keys": (
        DEFAULT.replace("  n_layers: 2\n", "").replace("d_model:", "dmodel:"),
        ["lr=fast", "zzz=1", "global_batch_size=13", "n_heads=0"],
        [
            "zzz: no such hyperparameter",
            "dmodel: no such hyperparameter; did you mean d_model?",
            "n_layers: missing",
            "d_model: missing",
            "lr = 'fast': must be a number from 1e-30 to 1e+30",
            "n_heads = 0: must be a whole number >= 1",
        ],
    ),
    "search range": (DEFAULT.replace("lr: 3.0e-3", f"lr: {SEARCH}"), [], ["lr = ", "search range", "lr=VALUE"]),
    "search range in an override": (DEFAULT, [f"lr={SEARCH}"], ["lr = ", "search range", "lr=VALUE"]),
    "combinations": (
        DEFAULT,
        ["micro_batch_size=5", "n_heads=3"],
        ["micro_batch_size = 5", "16 sequences", "use 4 or 8", "n_heads = 3", "d_model = 128", "use 2 or 4"],
    ),
    "no key=value": (DEFAULT, ["max_steps", "10"], ["'max_steps'", "key=value", "max_steps=100"]),
    "override not YAML": (DEFAULT, ["lr=[1"], ["'lr=[1'", "not YAML"]),
    "override of no such date": (DEFAULT, ["lr=2024-99-99"], ["lr", "2024-99-99"]),
    "unknown option": (DEFAULT, ["--max-steps", "10"], ["--max-steps"]),
    "option without value": (DEFAULT, ["--config"], ["--config"]),
    "slots": (DEFAULT, ["--dry-run", "slots_per_trial=0"], ["slots_per_trial = 0", "a whole number >= 1"]),
    "slots do not divide": (DEFAULT, ["--dry-run", "slots_per_trial=3"], ["the 3 ranks", "use 15 or 18"]),
    "nothing to resume": (DEFAULT, ["--resume", "latest"], ["--resume latest", "checkpoints", "without --resume"]),
    "no such checkpoint": (
        DEFAULT,
        ["--resume", "3f0c9f7a-0000-4000-8000-000000000000"],
        ["3f0c9f7a-0000-4000-8000-000000000000", "no such checkpoint in checkpoints"],
    ),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Outcome, Path]]:
    """How each case ended, and where."""

    def refuse(case: tuple[str | bytes | None, list[str], list[str]]) -> tuple[Outcome, Path]:
        content, arguments, _ = case
        folder = tmp_path_factory.mktemp("refusal")
        if content is not None:
            (folder / "config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        return run(*arguments, ranks=0, cwd=folder, timeout=60), folder

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(refuse, CASES.values()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_command_line_refuses(refusals: dict[str, tuple[Outcome, Path]], name: str) -> None:
    content, _, says = CASES[name]
    outcome, folder = refusals[name]
    assert outcome.code == 1, outcome.text
    assert outcome.text.count("fsdp_train.py: ") == 1, outcome.text
    assert "Traceback" not in outcome.text
    assert all(part in outcome.text for part in says), outcome.text
    assert [path.name for path in folder.iterdir()] == ([] if content is None else ["config.yaml"])


def test_only_one_rank_refuses(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(DEFAULT)
    outcome = run("global_batch_size=15", "n_heads=3", ranks=2, cwd=tmp_path, timeout=60)
    assert outcome.code != 0
    for line in ("global_batch_size = 15 does not divide by the 2 ranks: use 14 or 16", "n_heads = 3 does not divide"):
        assert outcome.text.count(line) == 1, outcome.text
    assert 'fsdp_train.py", line' not in outcome.text, "no traceback of ours"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]

    # The launcher may have ended rank 1 before it could speak; left alone, it has nothing to say either.
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    outcome = run("global_batch_size=15", ranks=0, cwd=tmp_path, env=env, timeout=60)
    assert (outcome.code, outcome.text) == (1, "")


def test_help(tmp_path: Path) -> None:
    outcome = run("--help", ranks=0, cwd=tmp_path, timeout=60)
    assert outcome.code == 0
    assert "key=value" in outcome.text and "--resume" in outcome.text
    assert list(tmp_path.iterdir()) == []
