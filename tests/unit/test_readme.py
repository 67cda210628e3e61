"""What the READMEs say exists, their line references are right, and their commands are ones that programs take."""

import argparse
import ast
import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import pytest
from determined.cli import _declarative_argparse, cli

import fsdp_train
import line_links
from launch import ROOT, SCRIPT, run
from mutations import MUTATIONS
from tiny import overrides

README = (ROOT / "README.md").read_text()
TESTS = (ROOT / "tests/README.md").read_text()
SOURCES = "".join((ROOT / name).read_text() for name in ("fsdp_train.py", "model.py", "data.py"))
BLOCKS = re.findall(r"```bash\n(.*?)```", README + TESTS, re.S)
INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README + TESTS, flags=re.S))
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()] + INLINE
# What others say that have a row in the troubleshooting.
FOREIGN = {"Timed out", "address already in use", "CUDA out of memory", "can't allocate memory", "exitcode: -9", "500"}
FOREIGN |= {"No module named 'tensorboard'", "externally-managed-environment", "workspace/project not found", "Timeout"}
FOREIGN |= {"cannot unmarshal string into"}


def test_line_references() -> None:
    heads = re.findall(r"^# [-=]{4} (.+?) [-=]{4}$", SCRIPT.read_text(), re.M)
    assert re.findall(r"^\| \[([^`\]]+)\]\(fsdp_train\.py#L", README, re.M) == heads, "a section that the map lacks"
    assert line_links.corrected(README) == README, "run python tests/tools/line_links.py"
    assert len(README.splitlines()) <= 300


def test_named_files_exist() -> None:
    for text, folder in ((README, ROOT), (TESTS, ROOT / "tests")):
        for link in re.findall(r"\]\((?!https:)([^)#]+)", text):
            assert (folder / link).exists(), link
    made = {"my_data.py", "my_model.py"}  # by a `cp` of the README
    for name in set(re.findall(r"\btests/[\w/]+\.\w+|\b\w+\.(?:py|yaml|png|txt)\b", README + TESTS)) - made:
        places = ("", "tests", "tests/tools", "tests/launch", "tests/cluster")
        assert any((ROOT / place / name).exists() for place in places), name


def test_newcomers_commands_set_themselves_up() -> None:
    start = "python3 -m venv .venv && .venv/bin/pip install -q -r "
    train, test = [command.removeprefix(start) for command in COMMANDS if command.startswith(start)]
    assert train == "requirements.txt && .venv/bin/torchrun --standalone --nproc-per-node 2 fsdp_train.py"
    assert test == "tests/requirements.txt && .venv/bin/python -m pytest"
    assert next(line for line in README.splitlines() if "-m pytest" in line) == start + test, ".ci/run takes this line"


def test_hyperparameters_and_metrics() -> None:
    table = README.split("## Hyperparameters")[1].split("Reported are")[0]
    names = [name for row in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
    fields = {field.name for field in dataclasses.fields(fsdp_train.Config)} - {"seed", "slots_per_trial"}
    assert sorted(names) == sorted(fields)
    for name in set(re.findall(r"`(\w+)`", README.split("Reported are")[1].split("\n\n")[0])) - {"float16"}:
        assert f'"{name}"' in SOURCES, name


def test_troubleshooting_quotes_the_script() -> None:
    rows = README.split("## Troubleshooting")[1].split("|---|---|\n")[1]
    quoted = [words for row in re.findall(r"^\| (.+?) \| ", rows, re.M) for words in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 25
    for words in set(quoted) - FOREIGN:
        assert words in SOURCES, words


def test_commands_of_the_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that create an experiment are checked as the master does in tests/cluster."""
    monkeypatch.chdir(ROOT)
    parser = argparse.ArgumentParser()
    _declarative_argparse.add_args(parser, cli.all_args_description)
    commands = [command for command in COMMANDS if re.match(r"det \w+ \w+ \S", command)]
    assert len(commands) > 12
    for command in commands:
        parser.parse_args(shlex.split(command)[1:])


def test_commands_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = [command for command in COMMANDS if re.match(r"(torchrun|python) .*\bfsdp_train\.py", command)]
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command)
        monkeypatch.setattr("sys.argv", words[words.index("fsdp_train.py") :])
        hparams, _, _ = fsdp_train.read_settings(None)
        fsdp_train.parse_config(hparams, hparams["slots_per_trial"])


def test_what_can_be_deleted(tmp_path: Path) -> None:
    """All of it at once: the script still trains on two ranks, and resumes on one."""
    rows = README.split("## What to delete first")[1].split("|---|---|---|\n")[1].split("\n\n")[0]
    lines = SCRIPT.read_text().splitlines(keepends=True)
    for statement in line_links.statements(rows):
        for number in statement:
            lines[number - 1] = ""
    for name in ("model.py", "data.py", "config.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    script = tmp_path / "fsdp_train.py"
    script.write_text("".join(lines))
    for arguments, ranks in ((["max_steps=8"], 2), (["max_steps=12", "--resume", "latest"], 1)):
        outcome = run(*overrides(), *arguments, ranks=ranks, cwd=tmp_path, script=script)
        assert outcome.code == 0 and "done: validation_loss" in outcome.text, outcome.text
    assert "at step 8 of checkpoint" in outcome.text


def test_mutations_fit_the_code_that_they_break() -> None:
    for mutation in MUTATIONS:
        source = (ROOT / mutation.file).read_text()
        count = source.count(mutation.text)
        assert count == 1, f"{mutation.file} has {mutation.text!r} {count} times: mend tests/tools/mutations.py"
        ast.parse(source.replace(mutation.text, mutation.broken))
        assert all((ROOT / "tests" / name).exists() for name in mutation.tests.split()), mutation
