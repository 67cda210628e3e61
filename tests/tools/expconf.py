"""What the master of Determined 0.38.1 says to an experiment config, as far as was seen or its schemas tell."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from typing import Any

from determined.cli import ntsc
from determined.common import util

Json = dict[str, Any]

# What a key takes, its section, its name; null is always taken. A ~ marks what is ignored or deprecated, or has no
# effect on a Core API script, which decides itself when to validate, to save and to profile.
TABLE = """
string | | name description workspace project
string | bind_mounts. | host_path container_path propagation
string | checkpoint_storage. | host_path storage_path propagation container_path bucket prefix endpoint_url access_key
string | checkpoint_storage. | secret_key container connection_string account_url
string | | log_policies.name log_policies.pattern resources.resource_pool ~resources.agent_label
string | searcher. | name metric time_metric source_checkpoint_uuid
integer | | max_restarts preemption_timeout ~records_per_epoch ~scheduling_unit reproducibility.experiment_seed
integer | | ~profiling.begin_on_batch ~profiling.end_after_batch retention_policy.log_retention_days
integer | checkpoint_storage. | save_experiment_best save_trial_best save_trial_latest
integer | resources. | slots_per_trial max_slots priority
integer | searcher. | source_trial_id max_trials max_concurrent_trials max_time max_rungs num_rungs
number | | resources.weight searcher.divisor
boolean | | ~debug ~perform_initial_validation bind_mounts.read_only environment.force_pull_image
boolean | | ~profiling.enabled ~profiling.sync_timings resources.is_single_node ~resources.native_parallel
boolean | | searcher.smaller_is_better ~searcher.stop_once
array | environment. | add_capabilities drop_capabilities proxy_ports
array | | labels resources.devices searcher.bracket_rungs
object | | hyperparameters data slurm pbs ~optimizations ~min_checkpoint_period ~min_validation_period ~data_layer
object | | ~internal ~security ~tensorboard_storage integrations.pachyderm integrations.webhooks
object | environment. | registry_auth pod_spec ports
any | | entrypoint environment.image environment.environment_variables resources.shm_size ~searcher.max_length
word | | ~checkpoint_policy checkpoint_storage.type log_policies.action searcher.mode
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
MARKED = {section + name: kind for kind, section, names in ROWS for name in names.split()}
KEYS = {key.replace("~", ""): kind for key, kind in MARKED.items()}
IDLE = {key.replace("~", "") for key in MARKED if "~" in key}
SECTIONS = {key.rpartition(".")[0] for key in KEYS} - {""}
LISTS = {"bind_mounts", "log_policies"}
WORDS = {
    "checkpoint_policy": ("all", "best", "none"),
    "checkpoint_storage.type": ("azure", "directory", "gcs", "s3", "shared_fs"),
    "log_policies.action": ("cancel_retries", "exclude_node"),
    "searcher.mode": ("aggressive", "conservative", "standard"),
}
COUNTS = {"max_restarts", "resources.slots_per_trial", *(key for key in KEYS if ".save_" in key)}
LIMITS = {key: (0, 2**31) for key in COUNTS}
LIMITS |= {"resources.priority": (1, 99), "retention_policy.log_retention_days": (-1, 32767)}

# The keys of a searcher, required ones first, then a "/".
COMMON = "metric / name smaller_is_better source_trial_id source_checkpoint_uuid max_length"
HALVING = f"max_trials {COMMON} max_concurrent_trials divisor stop_once time_metric max_time"
SEARCHERS = {
    "single": COMMON,
    "grid": f"{COMMON} max_concurrent_trials",
    "random": f"max_trials {COMMON} max_concurrent_trials",
    "adaptive_asha": f"{HALVING} mode max_rungs bracket_rungs",
    "async_halving": f"num_rungs {HALVING}",
}
ENDS = ("minval", "maxval")
RANGES = {"const": ("val",), "categorical": ("vals",), "int": ENDS, "double": ENDS, "log": (*ENDS, "base")}


def apply_cli(config: Json, overrides: list[str]) -> Json:
    """What `det experiment create --config OVERRIDE ...` sends of a config."""
    changed = ntsc.parse_config_overrides(copy.deepcopy(config), overrides)
    return util.yaml_safe_load(util.yaml_safe_dump(changed))


def problems(config: Json, projects: Collection[tuple[str, str]] = (), slots: float = math.inf) -> list[str]:
    """Why the master refuses a config, where these (workspace, project) exist and the pool has so many slots."""
    found = [*_keys(config, "")]
    if found:
        return found
    searcher, resources = (config.get(name) or {} for name in ("searcher", "resources"))
    place = config.get("workspace"), config.get("project")
    if not config.get("entrypoint"):
        found.append("managed experiments require entrypoint")
    if (place[0] is None) != (place[1] is None):
        found.append("workspace and project: both must be included if one is provided")
    elif place[0] is not None and place not in projects:
        found.append(f"workspace/project not found: {place}")
    if (resources.get("slots_per_trial") or 0) > slots:
        found.append("slots requested exceeds cluster capacity")
    grid = searcher.get("name") == "grid"
    return [*found, *_searcher(searcher), *_hyperparameters(config.get("hyperparameters") or {}, "", grid)]


def _kind(value: Any) -> str:
    """The type in terms of JSON schema, where 2.0 is an integer."""
    if isinstance(value, float) and not value.is_integer():
        return "number"
    names = {bool: "boolean", int: "integer", float: "integer", str: "string", list: "array", type(None): "null"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "object")


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _keys(section: Json, prefix: str) -> Iterator[str]:
    """Unknown keys, and values of other types."""
    for name, value in section.items():
        key, kind = f"{prefix}{name}", _kind(value)
        wanted = "array" if key in LISTS else "object" if key in SECTIONS else KEYS.get(key)
        if wanted is None:
            yield f'{prefix or "config"}: additionalProperties "{name}" not allowed'
        elif value is None:
            continue
        elif wanted == "word":
            if value not in WORDS[key]:
                yield f"{key}: must be one of " + " or ".join(f'"{word}"' for word in WORDS[key])
        elif wanted not in ("any", kind) and (wanted, kind) != ("number", "integer"):
            yield f"{key}: expected {wanted} or null, but got {kind}"
        elif key in SECTIONS:
            for part in value if key in LISTS else [value]:
                yield from _keys(part, f"{key}.")
        elif key == "resources.shm_size" and kind != "integer":
            yield f"cannot unmarshal {kind} into {key} of type int"
        elif key == "environment.environment_variables":
            devices = value if kind == "object" else {"cpu": value}
            if not devices.keys() <= {"cpu", "cuda", "rocm", "gpu"} or not all(map(_are_strings, devices.values())):
                yield f"{key}: neither a list of strings nor a map of cpu, cuda, or rocm to lists of strings"
        elif key in LIMITS and not LIMITS[key][0] <= value <= LIMITS[key][1]:
            yield f"{key}: {value} is not within {LIMITS[key]}"


def _searcher(searcher: Json) -> Iterator[str]:
    name = searcher.get("name")
    if name not in SEARCHERS:
        yield f"searcher.name: {name!r} is not one of {list(SEARCHERS)}"
        return
    required, _, others = (part.split() for part in SEARCHERS[name].partition(" / "))
    yield from (f"searcher: {key} is a required property" for key in required if searcher.get(key) is None)
    for key in searcher.keys() - {*required, *others}:
        yield f'searcher: additionalProperties "{key}" not allowed'
    if name == "adaptive_asha" and None in (searcher.get("max_time"), searcher.get("time_metric")):
        yield "searcher: adaptive_asha requires max_time and time_metric to be set"


def _hyperparameters(value: Any, path: str, grid: bool) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    if not path or "type" not in value:
        for name, part in value.items():
            yield from _hyperparameters(part, f"{path}.{name}", grid)
    elif value["type"] not in RANGES:
        yield f"hyperparameters{path}: type is {value['type']!r}, not one of {list(RANGES)}"
    else:
        required = RANGES[value["type"]]
        count = {"count"} if "minval" in required else set()
        missing = [key for key in (*required, *(count if grid else ())) if key not in value]
        if missing:
            yield f"hyperparameters{path}: missing properties: " + ", ".join(f'"{key}"' for key in missing)
        elif count and not value["minval"] < value["maxval"]:
            yield f"hyperparameters{path}: minval must be less than maxval"
        for key in value.keys() - {"type", *required, *count}:
            yield f'hyperparameters{path}: additionalProperties "{key}" not allowed'
