"""What the README says exists, and its commands are ones that the programs take."""

import argparse
import re
import shlex
import typing
from pathlib import Path

import pytest
from determined.cli import _declarative_argparse, checkpoint, experiment, ntsc
from determined.common import util
from launch import ROOT

import fsdp_train

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]


def test_hyperparameter_table_has_each_field_once() -> None:
    section = README.split("## Hyperparameters")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(typing.get_type_hints(fsdp_train.Config))


def test_links_and_named_files_exist() -> None:
    names = set(re.findall(r"\]\((?!http|#)([^)#]+)\)", README)) | set(
        re.findall(r"`([\w/]+\.(?:py|yaml|txt))`", README)
    )
    written_by_recipes = {"my_data.py", "my_model.py"}
    assert names and {name for name in names - written_by_recipes if not (ROOT / name).exists()} == set()


def test_newcomers_commands_are_single_lines_that_set_themselves_up() -> None:
    train, test = [command for command in COMMANDS if command.startswith("python3 -m venv .venv && ")]
    for command, requirements, ending in (
        (train, "requirements.txt", "torchrun --standalone --nproc-per-node 2 fsdp_train.py"),
        (test, "tests/requirements.txt", "python -m pytest"),
    ):
        install, run = command.split(" && ")[1:]
        assert install == f".venv/bin/pip install -q -r {requirements}" and (ROOT / requirements).exists()
        assert run == f".venv/bin/{ending}"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(("det e", "det c"))])
def test_det_command(command: str) -> None:
    parser = argparse.ArgumentParser()
    _declarative_argparse.add_args(parser, experiment.args_description + checkpoint.args_description)
    words = [str(ROOT / word) if word.endswith(".yaml") else word for word in shlex.split(command)[1:]]
    args = parser.parse_args(words)
    if not command.startswith("det experiment create"):
        return
    config = util.yaml_safe_load((ROOT / "config.yaml").read_text())
    config = ntsc.parse_config_overrides(config, args.config)
    if "searcher" in command:
        assert config["hyperparameters"]["lr"] == {"type": "log", "base": 10, "minval": -4, "maxval": -2}
        needed = {"random": {"max_trials"}, "adaptive_asha": {"max_trials", "time_metric", "max_time"}}
        searcher = config["searcher"]
        assert {"metric", *needed[searcher["name"]]} <= searcher.keys()
        assert all(type(searcher[key]) is int for key in ("max_trials", "max_time") if key in searcher)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python fsdp_train.py")])
def test_script_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", shlex.split(command)[1:])
    args = fsdp_train.parse_arguments()
    assert (ROOT / args.config).is_file()


def test_options_named_are_the_scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fsdp_train.py", "--help"])
    with pytest.raises(SystemExit):
        fsdp_train.parse_arguments()
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    others = {
        "--config",
        "--follow-first-trial",
        "--standalone",
        "--nproc-per-node",
        "--nnodes",
        "--best",
        "--output-dir",
        "--kills",
        "--json",
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - others <= known


def test_metric_names_are_those_reported() -> None:
    source = Path(fsdp_train.__file__).read_text()
    for name in re.findall(r"`(\w+)`", README.split("Reported are")[1].split("\n\n")[0]):
        assert f'"{name}"' in source
