"""The experiment configs are what a master of Determined 0.38.1 accepts, and what is sent with them."""

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from determined.cli import _declarative_argparse, ntsc
from determined.cli import experiment as det_experiment
from determined.common.context import read_v1_context
from determined.common.util import yaml_safe_dump, yaml_safe_load

import fsdp_train
from expconf import Json, problems

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # inside determined

ROOT = Path(__file__).resolve().parents[2]
FILES = ("config.yaml", "distributed.yaml")
UPLOAD = {*FILES, "README.md", "data.py", "fsdp_train.py", "model.py", "requirements.txt"}
# Accepted without effect: a Core API script decides itself how long it trains, and when it validates and profiles.
IDLE = ("max_length", "min_validation_period", "scheduling_unit", "profiling")


def experiment(name: str) -> Json:
    return yaml_safe_load((ROOT / name).read_text())


def changed(changes: Json) -> Json:
    """config.yaml with other values of some keys."""
    config = experiment("config.yaml")
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        place = config.setdefault(section, {}) if section else config
        place[name] = value
        if value == "(none)":
            del place[name]
    return config


def test_the_checker_says_what_the_master_said() -> None:
    verdicts = Path(__file__).with_name("config-verdicts.tsv").read_text().splitlines()[2:]
    assert len(verdicts) == 32 and problems(experiment("config.yaml"), slots=2) == []
    for change, verdict, reason in (line.split("\t") for line in verdicts):
        found = problems(changed(yaml_safe_load(f"{{{change}}}")), slots=2)
        assert len(found) == (verdict == "refused"), (change, found)
        if found:
            assert all(word in found[0] for word in reason.partition(" (")[0].split(" ... ")), (change, found)
    research = changed({"workspace": "Research", "project": "lm"})
    assert [len(problems(research, [("Research", name)])) for name in ("lm", "other")] == [0, 1]


@pytest.mark.parametrize("name", FILES)
def test_files(name: str) -> None:
    config = experiment(name)
    assert problems(config) == []
    assert not any(f"{key}:" in (ROOT / name).read_text() for key in IDLE)
    assert config["searcher"] == {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
    assert config["environment"]["image"] == "determinedai/pytorch-ngc:0.38.1"
    slots, restarts = {"config.yaml": (2, 1), "distributed.yaml": (16, 5)}[name]
    assert (config["resources"]["slots_per_trial"], config["max_restarts"]) == (slots, restarts)
    launcher, _, script = config["entrypoint"].strip().rpartition(" ")
    assert launcher == "python3 -m determined.launch.torch_distributed python3"
    assert script in UPLOAD and (ROOT / script).is_file()


def test_readme_commands() -> None:
    """With the workspaces and projects that the README creates."""
    readme = (ROOT / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^det experiment create .*", readme, re.M)  # in blocks
    commands += re.findall(r"`(det experiment create [^`]+)`", readme)
    assert len(commands) >= 5
    workspaces = re.findall(r"det workspace create (\S+)", readme)
    projects = [pair for pair in re.findall(r"det project create (\S+) (\S+)", readme) if pair[0] in workspaces]
    parser = argparse.ArgumentParser()
    _declarative_argparse.add_args(parser, det_experiment.args_description)
    for command in commands:
        words = [str(ROOT / word) if word.endswith(".yaml") else word for word in shlex.split(command)[1:]]
        arguments = parser.parse_args(words)
        with arguments.config_file as file:
            config = ntsc.parse_config_overrides(yaml_safe_load(file), arguments.config)
        assert problems(yaml_safe_load(yaml_safe_dump(config)), projects) == [], command


def test_the_large_run_has_what_a_real_run_needs() -> None:
    config = experiment("distributed.yaml")
    assert config["resources"]["shm_size"] == 16 * 2**30
    assert config["checkpoint_storage"] == {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 2}
    variables = dict(line.split("=", 1) for line in config["environment"]["environment_variables"])
    assert int(variables["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0 and variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert int(variables["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > fsdp_train.TIMEOUT.total_seconds()


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
    left_behind = "checkpoints/uuid/__0_0.distcp traces/rank0.1.pt.trace.json __pycache__/model.cpython-310.pyc"
    left_behind += " weights.pt tokens.bin .venv/bin/python .git/HEAD .mypy_cache/x.json .ruff_cache/x"
    for name in {*listed, *left_behind.split()}:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    shutil.copy(ROOT / ".detignore", tmp_path)
    sent = {file.path for file in read_v1_context(tmp_path)}
    assert sent == UPLOAD == {name for name in listed if not name.startswith((".", "tests/"))}
