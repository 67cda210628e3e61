"""Launches that people get wrong: each kind ends in one message that says what to write instead, and none hangs."""

import os
import signal
import socket
import sys
from collections.abc import Collection, Iterable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest

from cluster import can_unshare
from launch import ROOT, SCRIPT, Outcome, free_port, launch, run, start
from tiny import overrides

CONFIG = ("--config", str(ROOT / "config.yaml"))
FEW = overrides(max_steps=2, validation_period=2, warmup_steps=1)
GOOD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
GOOD |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
ON_SECOND_NODE = "import os, sys\nif os.environ['GROUP_RANK'] == '1':\n    {}"  # before the script runs there
NODES = {"ranks": 2, "nodes": 2}
TORCHRUN = "torchrun --nnodes"  # what a message says to use
Options = dict[str, Any]  # of `train`
Cases = list[tuple[Options, list[str]]]  # how to launch, and the words of the message


def train(cwd: Path, arguments: Sequence[str] = (), ranks: int = 0, **options: Any) -> Outcome:
    return run(*CONFIG, *FEW, *arguments, ranks=ranks, cwd=cwd, grace=60, **options)


def train_each(cwd: Path, cases: Iterable[Options]) -> list[Outcome]:
    """A few launches side by side, since many wait for something."""
    with ThreadPool(4) as pool:
        return pool.map(lambda options: train(cwd, **options), cases, chunksize=1)


def assert_trained(cwd: Path, cases: list[Options]) -> list[Outcome]:
    outcomes = train_each(cwd, cases)
    for options, outcome in zip(cases, outcomes, strict=True):
        assert set(outcome.codes) == {0} and "done: " in outcome.text, f"{options}: {outcome.codes} {outcome.text}"
    return outcomes


def assert_refused(cwd: Path, cases: Cases, codes: Collection[int] = (1,)) -> None:
    """One message on each node, with the words of the case."""
    outcomes = train_each(cwd, [options for options, _ in cases])
    for (options, words), outcome in zip(cases, outcomes, strict=True):
        shown = f"{words} of {options}: {outcome.codes} {outcome.text}"
        assert set(outcome.codes) <= set(codes), shown
        assert outcome.text.count("fsdp_train.py: ") == options.get("nodes", 1), shown
        assert all(word in outcome.text for word in words), shown
        assert "Traceback" not in outcome.text, shown
        assert "first step" not in outcome.text or "cannot be saved to" in words[0], shown


def place(**changes: Any) -> dict[str, str]:
    """What a launcher tells the only rank, with changes; None takes a variable away."""
    given = GOOD | {"MASTER_PORT": str(free_port())} | changes
    return {name: value for name, value in given.items() if value is not None}


def test_launcher_variables(tmp_path: Path) -> None:
    """None is guessed: an incomplete or impossible set is refused, with the command to use."""
    faults: list[tuple[str, Any]] = [(name, None) for name in (*GOOD, "MASTER_PORT") if name != "MASTER_ADDR"]
    faults += [("RANK", value) for value in ("", "x", "1", "-1", "²", "99999999999999999999")]
    faults += [("WORLD_SIZE", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4")]
    faults += [("GROUP_RANK", "1"), ("GROUP_WORLD_SIZE", "4"), ("MASTER_PORT", "http")]
    cases: Cases = []
    for name, value in faults:
        cases.append(({"env": place(**{name: value})}, [f"'{name}': '{value or ''}'", TORCHRUN]))
    # Of wrappers such as Kubeflow's; and what is left in a shell.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for env in (address | {"RANK": "0", "WORLD_SIZE": "2"}, address, {"WORLD_SIZE": "8"}):
        cases.append(({"env": env}, ["'LOCAL_RANK': ''", TORCHRUN]))
    # Nodes of 2 and 1 ranks would build other meshes, and wait for each other.
    uneven = "import os\nrank = int(os.environ['RANK'])\nos.environ |= {'GROUP_WORLD_SIZE': '2', 'GROUP_RANK': "
    uneven += "str(rank // 2), 'LOCAL_RANK': str(rank % 2), 'LOCAL_WORLD_SIZE': '21'[rank // 2]}"
    cases.append(({"ranks": 3, "nodes": 3, "before": uneven}, ["'LOCAL_WORLD_SIZE': '1'", TORCHRUN]))
    # Tasks of srun or mpirun would train the same run N times; but one, or a batch script's SLURM_NTASKS, is no sign.
    single = dict.fromkeys(("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), "1")
    for env in (single | {"PMI_SIZE": "2"}, *({name: "2"} for name in single)):
        cases.append(({"env": env}, ["2 tasks, but no RANK", TORCHRUN]))
    assert_refused(tmp_path, cases)
    torchrun_under_srun = place(SLURM_STEP_NUM_TASKS="2")
    assert_trained(tmp_path, [{"env": single | {"SLURM_NTASKS": "8"}}, {"env": torchrun_under_srun}])


def test_master_address(tmp_path: Path) -> None:
    """Refused at once where it is none that can be reached, with address and port."""
    cases: Cases = [({"env": place(MASTER_PORT=port)}, [f"port {port}"]) for port in ("70000", "9" * 20)]
    for address in ("::1", "[::1]", "no-such-host.invalid", "127.0.0.1:29500", "a" * 80, "", None):
        env = place(MASTER_ADDR=address)
        named = f"MASTER_ADDR = {'nothing' if address is None else address}, port {env['MASTER_PORT']}"
        cases.append(({"env": env}, [named, "no process group"]))
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        port = str(other_program.getsockname()[1])
        cases.append(({"env": place(MASTER_PORT=port)}, [f"port {port}", "ddress already in use"]))
        assert_refused(tmp_path, cases)
    assert_trained(tmp_path, [{"env": place(MASTER_ADDR=address)} for address in ("localhost", "0.0.0.0")])


def test_no_wait_of_the_start_is_without_a_limit(tmp_path: Path) -> None:
    """For a rank that does not come, another program's port, a closed or taken port of the Core API."""
    # Where the script says ten minutes, two seconds.
    haste = "import datetime, os\ntime = datetime.timedelta\n"
    haste += "datetime.timedelta = lambda minutes=0, seconds=0: time(seconds=seconds + minutes / 5)\n"
    ports = haste + "from determined import core\ncore.DistributedContext.__init__.__kwdefaults__.update("
    first = {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    second = first | {"RANK": "1", "GROUP_RANK": "1"}
    cases: Cases = []
    with socket.create_server(("127.0.0.1", 0)) as deaf, socket.create_server(("", 0)) as taken:
        envs = [place(**first), place(**second), place(**second, MASTER_ADDR="192.0.2.1")]  # nothing answers there
        for env in (*envs, place(**second, MASTER_PORT=str(deaf.getsockname()[1]))):
            words = f"MASTER_ADDR = {env['MASTER_ADDR']}, port {env['MASTER_PORT']}: no process group"
            cases.append(({"env": env, "before": haste}, [words]))
        closed = "pub_port=9 + int(os.environ['RANK']), pull_port=11 + int(os.environ['RANK']))"
        for change in (closed, f"pub_port={taken.getsockname()[1]}, pull_port={free_port()})"):
            cases.append((NODES | {"before": ports + change}, ["MASTER_ADDR = 127.0.0.1, port ", "no process group"]))
        # A thread that still waits inside torch may return while the interpreter ends, and abort it.
        assert_refused(tmp_path, cases, codes=(1, -signal.SIGABRT))


def test_a_fault_or_difference_of_one_node(tmp_path: Path) -> None:
    """It is said once on each node, and no rank waits for those that are gone."""
    (tmp_path / "bad").write_text("a: [")
    (tmp_path / "elsewhere").mkdir()
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "changed.py").touch()
    (scripts / ".#changed.py").symlink_to("user@host.123:456")  # Emacs's lock
    other_scripts = "import pathlib; glob = pathlib.Path.glob; pathlib.Path.glob = "
    other_scripts += f"lambda self, p: glob(pathlib.Path({str(scripts)!r}) if p.endswith('*.py') else self, p)"
    faults = {
        "sys.argv[2] = 'absent'": "--config absent",
        "sys.argv[2] = 'bad'": "--config bad",
        "sys.argv += ['--nothing']": "'--nothing'",
        "sys.argv += ['--config']": "expected one argument",
        "sys.argv += ['lr=fast']": "lr = fast",
        "sys.argv += ['--checkpoint-dir', 'bad']": f"{tmp_path / 'bad'}: cannot be used",
        "sys.argv += ['--resume', 'latest']": "--resume latest: no whole checkpoint",
    }
    differences = {
        "sys.argv += ['--checkpoint-dir', 'elsewhere']": ("/checkpoints'", "/elsewhere'"),
        f"sys.argv[2] = {CONFIG[1]!r}; os.chdir('elsewhere')": ("/checkpoints'", "elsewhere/checkpoints'"),
        "sys.argv += ['--resume', 'elsewhere']": ("'from': ''", "'from': 'elsewhere'"),
        "sys.argv += ['seed=2']": ("seed=1", "seed=2"),
        "sys.argv += ['lr=0.5']": ("lr=0.01", "lr=0.5"),
        "sys.argv += ['max_steps=9']": ("max_steps=2", "max_steps=9"),
        other_scripts: ("'scripts'", "'scripts'"),
        "import torch; torch.__version__ = '2.3.0'": ("'scripts'", "on torch 2.3.0"),
    }
    cases: Cases = []
    for source, words in faults.items():
        cases.append((NODES | {"before": ON_SECOND_NODE.format(source)}, [words, "(rank 1)"]))
    for source, (here, there) in differences.items():
        cases.append((NODES | {"before": ON_SECOND_NODE.format(source)}, ["rank 0 has ", here, "rank 1 has ", there]))
    four = {"ranks": 4, "nodes": 2, "before": ON_SECOND_NODE.format("sys.argv += ['n_heads=3']")}
    assert_refused(tmp_path, [*cases, (four, ["n_heads = 3 does not divide d_model = 16"])])
    assert_trained(tmp_path, [{"before": other_scripts}])


@pytest.mark.skipif(not can_unshare(), reason="mounts file systems, which takes root")
def test_file_systems_that_are_full_read_only_or_not_shared(tmp_path: Path) -> None:
    """Found before the first step; but that each node has half of a checkpoint, where the first save ends."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mount = "import ctypes; libc = ctypes.CDLL(None); assert libc.unshare(0x20000) == 0; "  # for this process only
    mount += "assert libc.mount(b'none', b'/', None, 0x44000, None) == 0; "
    mount += f"assert libc.mount(b'tmpfs', {bytes(folder)!r}, b'tmpfs', " + "{}) == 0"
    words = [f"--checkpoint-dir {folder}: cannot be used"]
    assert_refused(tmp_path, [({"before": mount.format(how)}, words) for how in ("0, b'size=64k'", "1, None")])
    separate = NODES | {"before": ON_SECOND_NODE.format(mount.format("0, None"))}
    assert_refused(tmp_path, [(separate, ["step 2 cannot be saved to", "No such file", "(rank 1)"])])
    assert list(folder.iterdir()) == [], "nothing half written is left"


def test_streams_that_are_closed_or_end(tmp_path: Path) -> None:
    """Training goes on to its end, or a message that nobody can read does not become a traceback."""
    words = " ".join([sys.executable, str(SCRIPT), *CONFIG, *FEW])
    # As Python finds them at its start.
    commands = {f"{words} 2>&-": 0, f"{words} >&- 2>&- <&-": 0, f"{words} --dry-run >&-": 0, f"{words} lr=fast 2>&-": 1}
    outcome = launch([["bash", "-c", command] for command in commands], tmp_path).finish(grace=300)
    assert outcome.codes == list(commands.values()), outcome.text
    # Of a pipe whose reader is gone, and a full disk.
    gone = "import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, {})"
    cases: list[Options] = [{"before": gone.format(2)}, {"before": "import os; os.dup2(os.open('/dev/full', 1), 2)"}]
    cases.append({"arguments": ["--dry-run"], "before": gone.format(1)})
    cases.append({"arguments": ["lr=fast"], "before": gone.format(2)})
    outcomes = train_each(tmp_path, cases)
    assert [ended.code for ended in outcomes] == [0, 0, 0, 1], outcomes
    for text in (outcome.text, *(ended.text for ended in outcomes)):
        assert not any(word in text for word in ("Traceback", "Broken", "Exception")), text
    assert len(list((tmp_path / "checkpoints").glob("*/train_state.json"))) == 4, "training went on to its end"


def test_tools_around_the_script(tmp_path: Path) -> None:
    """The interpreter ends normally, so that they can write what they found."""
    trace = ["-m", "trace", "--count", "-C", "counts", "--ignore-dir", f"{sys.prefix}:{sys.base_prefix}"]
    tools = [["-m", "cProfile", "-o", "prof.out"], trace, ["-m", "pdb", "-c", "continue", "-c", "quit"]]
    commands = [[sys.executable, *tool, str(SCRIPT), *CONFIG, *FEW] for tool in tools]
    outcome = launch(commands, tmp_path).finish(grace=300)
    assert outcome.codes == [0, 0, 0] and outcome.text.count("done: ") == 3, outcome.text
    assert (tmp_path / "prof.out").stat().st_size > 10_000
    counts = (tmp_path / "counts" / "fsdp_train.cover").read_text()
    assert "    1: " in counts and "train(core_context, run)" in counts
    hook = {"before": "import atexit; atexit.register(lambda: print('hook ran'))"}
    cases: list[Options] = [{"ranks": 2}, {"arguments": ["lr=fast"]}, {"arguments": ["--dry-run"]}]
    cases.append({"arguments": ["--help"]})
    outcomes = train_each(tmp_path, [hook | case for case in cases])
    assert [outcome.codes for outcome in outcomes] == [[0, 0], [1], [0], [0]], outcomes
    assert [outcome.text.count("hook ran") for outcome in outcomes] == [2, 1, 1, 1], outcomes
    assert "torchrun --standalone" in outcomes[3].text and "--resume" in outcomes[3].text


def test_directory_names(tmp_path: Path) -> None:
    """A local directory is a path, whatever is in its name; each is resumed from in one of the ways."""
    names = ["exp:lr", "file:x", "s3:/x", "C:\\x", "runs/lr=3e-3#2", "a;b, c's?", "~", "-", "ü \udcff", "new\nline"]
    names += ["a" * 255, '%20 %s {x} [a]* $HOME"']
    options = [[f"--checkpoint-dir={name}"] for name in names]
    assert_trained(tmp_path, [{"arguments": option} for option in options])
    assert {path.name for path in tmp_path.iterdir()} == {name.split("/")[0] for name in names}
    for number, name in enumerate(names):
        (saved,) = (tmp_path / name).iterdir()
        ways = ("latest", saved.name, f"{saved}/", os.path.relpath(saved, tmp_path))
        options[number].append(f"--resume={ways[number % 4]}")
    for outcome in train_each(tmp_path, [{"arguments": option} for option in options]):
        assert outcome.code == 0 and "nothing left to do at step 2" in outcome.text, outcome.text


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    """Found before the first step."""
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    (tmp_path / "loop").symlink_to("loop")
    names = ["file", "file/below", "dangling", "loop", "/proc/checkpoints", "/dev/null", "a" * 256]
    says = {name: f"{name}: cannot be used" for name in names}
    # An unset variable of the shell is none, and not the current folder.
    says |= dict.fromkeys(("s3://bucket/a", "https://host/x", "file:///tmp/x", ""), "no folder; see checkpoint_storage")
    cases: Cases = []
    for name, words in says.items():
        cases.append(({"arguments": ["--checkpoint-dir", name]}, ["--checkpoint-dir ", words]))
    full = "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=90_000)"
    cases.append((NODES | {"before": full}, ["checkpoints: cannot be used", "90,048 bytes"]))
    cases.append(({"arguments": ["--resume="]}, ["checkpoints: train_state.json is not whole"]))  # unset, too
    (tmp_path / "traces").touch()  # in the place of the profiler's folder
    cases.append((NODES | {"arguments": ["torch_profiler=true", "max_steps=8"]}, ["traces"]))
    assert_refused(tmp_path, cases)


def test_numbers_and_options(tmp_path: Path) -> None:
    """Of a run that ends in years the first reports come; what is too large or abbreviated is refused in no time."""
    warmups = assert_trained(tmp_path, [{"arguments": [f"warmup_steps={steps}"]} for steps in (2, 1_000_000_000, 1)])
    assert ["rate never reaches lr" in outcome.text for outcome in warmups] == [True, True, False], warmups
    job = start(*CONFIG, *FEW, "max_steps=1000000000", "reporting_period=1", cwd=tmp_path)
    job.wait_for("step 3/1000000000")
    job.signal(signal.SIGTERM)
    outcome = job.finish()
    assert outcome.code == -signal.SIGTERM and "days" in outcome.text, outcome.text
    cases: Cases = []
    for setting in ("max_steps=9223372036854775807", "n_layers=1000000", "lr=1e400", "lr=.nan", "seed=4294967296"):
        cases.append(({"arguments": [setting]}, [f"{setting.split('=')[0]} = ", "use "]))
    huge = ["d_model=1000000", "vocab_size=1000000"]  # 26 trillion parameters
    cases.append(({"arguments": huge}, ["checkpoints: cannot be used", "bytes for a checkpoint"]))
    # Else `--dry` would be an abbreviation that trains.
    for option in ("--dry", "--res=latest", "--c", "-v", "--dry-run=1", "lr="):
        cases.append(({"arguments": [option]}, [option.split("=")[0]]))
    assert_refused(tmp_path, cases)
