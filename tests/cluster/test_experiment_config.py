"""The experiment configs are what a master of Determined 0.38.1 accepts, and what is sent with them."""

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from determined.cli import _declarative_argparse
from determined.cli import experiment as det_experiment
from determined.common.context import read_v1_context
from determined.common.util import yaml_safe_load

import fsdp_train
from expconf import IDLE, apply_cli, problems

Json = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # inside determined

ROOT = Path(__file__).resolve().parents[2]
FILES = ("config.yaml", "distributed.yaml")
UPLOAD = {*FILES, "README.md", "data.py", "fsdp_train.py", "model.py", "requirements.txt"}
GONE = object()
POLICY = {"pattern": "(a", "action": "cancel_retries"}
ASHA = {"searcher.name": "adaptive_asha", "searcher.max_trials": 4}
LOG, CHOICE = {"type": "log", "minval": -4, "maxval": -2}, {"type": "categorical", "vals": [1, 2]}

# What was changed in config.yaml, for the lines about a master's verdicts that do not say it in YAML.
CHANGES: dict[str, list[Json]] = {
    'resources.shm_size: 16G (or "1000", any string)': [{"resources.shm_size": text} for text in ("16G", "1000", "x")],
    "unknown key at top level (foo: 1)": [{"foo": 1}],
    "unknown key in resources (gpus: 2)": [{"resources.gpus": 2}],
    "resources.slots_per_trial above what the pool has": [{"resources.slots_per_trial": 3}],
    "searcher adaptive_asha without time_metric (or with max_length only)": [
        ASHA | more for more in ({}, {"searcher.max_time": 200}, {"searcher.max_length": {"batches": 200}})
    ],
    "searcher random without max_trials": [{"searcher.name": "random"}],
    "searcher single with the old max_length": [{"searcher.max_length": {"batches": 200}}, {"searcher.max_length": 9}],
    "searcher without metric": [{"searcher.metric": GONE}],
    "workspace without project": [{"workspace": "Research"}, {"project": "lm"}],
    "workspace and a project that do not exist": [{"workspace": "Research", "project": "lm"}],
    "no entrypoint": [{"entrypoint": GONE}],
    "log_policies action: cancel_retry": [{"log_policies": [POLICY | {"action": "cancel_retry"}]}],
    'log_policies pattern that is no regular expression: "(a"': [{"log_policies": [POLICY]}],
    "checkpoint_storage without type": [{"checkpoint_storage": {"save_trial_latest": 2}}],
    "environment.environment_variables: [ABC] (no =)": [{"environment.environment_variables": ["ABC"]}],
    "hyperparameter that is a list": [{"hyperparameters.lr": [1, 2]}],
    "hyperparameter null": [{"hyperparameters.lr": None}],
    "hyperparameter {type: log, minval, maxval} without base": [{"hyperparameters.lr": LOG}],
    "hyperparameter {type: categorical} under searcher single": [{"hyperparameters.lr": CHOICE}],
    "min_validation_period, scheduling_unit, profiling.enabled, preemption_timeout": [
        {"min_validation_period": {"batches": 1}, "scheduling_unit": 9, "profiling.enabled": True},
        {"preemption_timeout": 60},
    ],
}


def experiment(name: str) -> Json:
    return yaml_safe_load((ROOT / name).read_text())


def changed(config: Json, changes: Json) -> Json:
    for key, value in changes.items():
        *path, name = key.split(".")
        section = config
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
        if value is GONE:
            del section[name]
    return config


def create_commands(readme: str) -> list[str]:
    """The `det experiment create CONFIG ...` in blocks and in the text."""
    blocks = re.findall(r"```bash\n(.*?)```", readme, re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", readme, flags=re.S))]
    return [line for line in lines if re.match(r"det (e|experiment) create .*\.yaml", line)]


def test_the_checker_says_what_the_master_said() -> None:
    lines = Path(__file__).with_name("config-verdicts.tsv").read_text().splitlines()[2:]
    verdicts = {change: rest for change, *rest in (line.split("\t") for line in lines)}
    assert len(verdicts) == 28 and CHANGES.keys() <= verdicts.keys()
    assert problems(experiment("config.yaml"), slots=2) == []
    for change, (verdict, reason) in verdicts.items():
        for changes in CHANGES.get(change) or [{key: yaml_safe_load(value)} for key, value in [change.split(": ", 1)]]:
            found = problems(changed(experiment("config.yaml"), changes), slots=2)
            assert len(found) == (verdict == "refused"), (changes, found)
            words = reason.partition(" (")[0].split(" ... ")
            assert verdict == "accepted" or all(word in found[0] for word in words), (changes, found)
    research = experiment("config.yaml") | {"workspace": "Research", "project": "lm"}
    assert [len(problems(research, [("Research", name)])) for name in ("lm", "other")] == [0, 1]


@pytest.mark.parametrize("name", FILES)
def test_files(name: str) -> None:
    config = experiment(name)
    assert problems(config) == []
    sections = {section: keys for section, keys in config.items() if isinstance(keys, dict)}
    assert not IDLE & {*config, *(f"{section}.{key}" for section, keys in sections.items() for key in keys)}
    assert config["searcher"] == {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
    assert config["environment"]["image"] == "determinedai/pytorch-ngc:0.38.1"
    slots, restarts = {"config.yaml": (2, 1), "distributed.yaml": (16, 5)}[name]
    assert (config["resources"]["slots_per_trial"], config["max_restarts"]) == (slots, restarts)
    entrypoint = re.fullmatch(
        r"python3 -m determined\.launch\.torch_distributed python3 (\S+)\s*", config["entrypoint"]
    )
    assert entrypoint is not None and entrypoint[1] in UPLOAD and (ROOT / entrypoint[1]).is_file()
    # The master reads YAML 1.1, where yes and on are booleans, and takes a dict for a search range.
    hparams = config["hyperparameters"]
    assert all(value is None or isinstance(value, (bool, int, float, str)) for value in hparams.values())
    booleans = {"y", "n", "yes", "no", "on", "off", "true", "false"}
    assert not booleans & {str(word).lower() for pair in hparams.items() for word in pair if isinstance(word, str)}


def test_readme_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    parser = argparse.ArgumentParser()
    _declarative_argparse.add_args(parser, det_experiment.args_description)
    workspaces = re.findall(r"det workspace create (\S+)", readme)
    projects = [pair for pair in re.findall(r"det project create (\S+) (\S+)", readme) if pair[0] in workspaces]
    commands = create_commands(readme)
    assert commands
    for command in commands:
        words = [str(ROOT / word) if word.endswith(".yaml") else word for word in shlex.split(command)[1:]]
        arguments = parser.parse_args(words)
        with arguments.config_file as file:
            config = apply_cli(yaml_safe_load(file), arguments.config)
        assert problems(config, projects) == [], command


def test_the_large_run_has_what_a_real_run_needs() -> None:
    config = experiment("distributed.yaml")
    assert config["resources"]["shm_size"] == 16 * 2**30
    assert config["checkpoint_storage"] == {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 2}
    variables = dict(line.split("=", 1) for line in config["environment"]["environment_variables"])
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in variables)
    assert int(variables["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0
    assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert variables["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    assert int(variables["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > fsdp_train.TIMEOUT.total_seconds()
    hparams = config["hyperparameters"]
    assert (hparams["sharding"], hparams["activation_checkpointing"]) == ("hybrid", True)


def test_log_policies() -> None:
    policies = experiment("distributed.yaml")["log_policies"]
    assert len({policy["name"] for policy in policies}) == len(policies)
    for line, actions in {
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has": ["cancel_retries"],
        "fsdp_train.py: hyperparameters:": ["cancel_retries"],
        "fsdp_train.py: checkpoint 3f0c9f7a: __0_0.distcp was changed after it was written": ["cancel_retries"],
        "RuntimeError: CUDA error: uncorrectable ECC error encountered": ["exclude_node"],
        "INFO: [7] fsdp_train: step 20/54000 | loss 10.8 | grad_norm 1.2 | ETA 3 days, 1:02:03": [],
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error": [],
    }.items():
        matching = [policy["action"] for policy in policies if re.search(policy["pattern"], f"[rank=3] {line}")]
        assert matching == actions, line


def test_upload(tmp_path: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    left_behind = (
        "checkpoints/uuid/__0_0.distcp traces/rank0.1.pt.trace.json __pycache__/model.cpython-310.pyc weights.pt"
    )
    left_behind += " tokens.bin .venv/bin/python .git/HEAD .mypy_cache/x.json .pytest_cache/README.md .ruff_cache/x"
    for name in {*listed, *left_behind.split()}:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    shutil.copy(ROOT / ".detignore", tmp_path)
    sent = {file.path for file in read_v1_context(tmp_path)}
    assert sent == UPLOAD == {name for name in listed if not name.startswith((".", "tests/"))}
