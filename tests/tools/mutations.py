"""Break the project in ways that matter, one at a time, and see whether the tests notice.

    python tests/tools/mutations.py [--only N ...]

Each time the test files that should notice run in a copy of the project, until one test fails: `caught`. `missed` means
that none did, `error` that pytest could not run them. The number of a mutation is that of its line in the table.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    name: str
    text: str  # occurs once in the file
    broken: str
    tests: str  # files in tests/ that should catch it
    file: str = "fsdp_train.py"


CHECKPOINT, CLUSTER, FAULTS = "launch/test_checkpoint.py", "cluster/test_cluster.py", "launch/test_faults.py"
LAUNCHES, TRAINING = "launch/test_launches.py", "launch/test_training.py"
UNSCALE = "state.scaler.unscale_(state.optimizer)"
CLIP = "clip_grad_norm(state.model, run.config.max_grad_norm)"
SEEDS = 'f"{config.seed}, {step}, {rank}"'

MUTATIONS = [
    # The step.
    Mutation("gradients are not unscaled", UNSCALE, "pass", TRAINING),
    Mutation("clipped before unscaled", UNSCALE, f"{CLIP}\n    {UNSCALE}", TRAINING),
    Mutation("norm of one rank's shards", "dist.all_reduce(total)", "str(total)", TRAINING),
    Mutation("norm adds up the replicas", "(total / replicas).sqrt()", "total.sqrt()", TRAINING),
    Mutation("each micro-batch counts whole", "yield loss * (len(micro_batch) / len(tokens))", "yield loss", TRAINING),
    Mutation("gradients are never zeroed", "    state.optimizer.zero_grad()", "    pass", TRAINING),
    Mutation("the rate is that of the step before", "learning_rate(step, ", "learning_rate(step - 1, ", TRAINING),
    Mutation("vectors decay", "whole.ndim >= 2", "whole.ndim >= 1", "unit/test_model.py", "model.py"),
    Mutation("Adam counts its step of zeros", 'state["step"].zero_()', "pass", TRAINING),
    Mutation("attention sees what comes", "is_causal=True", "is_causal=False", "unit/test_model.py", "model.py"),
    # Precision.
    Mutation("no MixedPrecision", "mixed_precision(run.config, run.amp_dtype)", "None", TRAINING),
    Mutation("no autocast", "enabled=amp_dtype is not None", "enabled=False", TRAINING),
    Mutation("reduce_dtype is ignored", "torch.float32 if config.reduce_dtype else amp_dtype", "amp_dtype", TRAINING),
    Mutation("the strongest GPU decides", "min(everywhere(", "max(everywhere(", CLUSTER),
    Mutation("every CPU multiplies bfloat16", 'if known.get("avx512_bf16") or', "if True or", "unit/test_precision.py"),
    # Metrics.
    Mutation("means of one rank", "dist.all_reduce(sums)", "sums.mul_(dist.get_world_size())", TRAINING),
    Mutation("validation adds up the ranks", "batches / dist.get_world_size()", "batches", TRAINING),
    Mutation("validation with dropout", "model.eval()", "model.train()", f"{CHECKPOINT} {TRAINING}"),
    Mutation("no dropout after a validation", "    model.train()", "    pass", CHECKPOINT),
    Mutation("skipped steps are not counted", "state.step - reported_step - round(applied)", "0", TRAINING),
    Mutation("means include skipped steps", ".masked_fill(skipped, 0)", "", TRAINING),
    Mutation("what is not finite goes on", "if not math.isfinite(value) or", "if False or", TRAINING),
    # Going on.
    Mutation("one dropout for all ranks", SEEDS, 'f"{config.seed}, {step}"', f"{CHECKPOINT} {TRAINING}"),
    Mutation("dropout by steps since the start", SEEDS, 'f"{config.seed}, {step - first_step}, {rank}"', CHECKPOINT),
    Mutation(
        "data are seeded a batch late", "size_in_batches == 0:", "size_in_batches == 1:", "unit/test_data.py", "data.py"
    ),
    Mutation("the scaler starts anew", 'state.scaler.load_state_dict(saved["scaler"])', "pass", CHECKPOINT),
    Mutation("data start anew", 'state.data.load_state_dict(saved["data"])', "None", CHECKPOINT),
    Mutation("a fork is a resume", 'run.trial_id not in (None, saved["trial_id"])', "False", f"{CHECKPOINT} {CLUSTER}"),
    Mutation("a changed shard is loaded", "checksum(path / name) != crc", "not (path / name).exists()", CHECKPOINT),
    Mutation("a checkpoint without validation", "validation_due = checkpoint_due or ", "validation_due = ", CHECKPOINT),
    Mutation("preempted on the last step", "leave = not is_last and (", "leave = (", CHECKPOINT),
    # Start and end.
    Mutation(
        "a failure stays on its rank",
        "in enumerate(outcomes):",
        "in [(r := dist.get_rank(), outcomes[r])]:",
        f"{FAULTS} {LAUNCHES}",
    ),
    Mutation("nodes may differ", "if here != there:", "if False:", LAUNCHES),
    Mutation("no look at the free space", "disk_usage(folder).free < ", "disk_usage(folder).free < 0 * ", FAULTS),
    Mutation("a rank beyond its size", "for i in (0, 2, 4)", "for i in (4,)", LAUNCHES),
    Mutation(
        "the hybrid mesh is transposed",
        "(ranks // run.local_ranks, run.local_ranks)",
        "(run.local_ranks, ranks // run.local_ranks)",
        TRAINING,
    ),
    Mutation("errors of the master are final", 'os.environ.setdefault("DET_RETRY_CONFIG", RETRY)', "pass", CLUSTER),
    Mutation("a search's stop is ignored", "run.stopped.set()", "pass", CLUSTER),
]


def try_one(mutation: Mutation) -> tuple[str, str]:
    """The verdict, and the test that failed."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        project = Path(folder, "project")
        shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".git", ".venv", "*cache*", "checkpoints"))
        file = project / mutation.file
        text = file.read_text()
        assert text.count(mutation.text) == 1, f"{mutation.text!r} must be in {mutation.file} once"
        file.write_text(text.replace(mutation.text, mutation.broken))
        tests = [f"tests/{name}" for name in mutation.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
        ended = subprocess.run(command, cwd=project, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", ended.stdout, re.M)
    verdict = {0: "missed", 1: "caught"}.get(ended.returncode, f"error: {(ended.stdout + ended.stderr)[-300:]}")
    return verdict, failed[1] if failed else ""


def main() -> None:
    numbers = range(1, len(MUTATIONS) + 1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", type=int, choices=numbers, default=numbers, metavar="N")
    args = parser.parse_args()
    verdicts = []
    print(f"|  n | {'what is broken':36} | verdict | seconds | by the test |\n|---|---|---|---|---|")
    for number in args.only:
        start = time.monotonic()
        mutation = MUTATIONS[number - 1]
        verdict, test = try_one(mutation)
        seconds = time.monotonic() - start
        print(f"| {number:2} | {mutation.name:36} | {verdict:7} | {seconds:7.0f} | {test} |", flush=True)
        verdicts.append(verdict)
    print(f"\n{verdicts.count('caught')} of {len(verdicts)} caught")
    sys.exit(verdicts.count("caught") < len(verdicts))


if __name__ == "__main__":
    main()
