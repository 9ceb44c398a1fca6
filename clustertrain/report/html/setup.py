"""What a run was started with: recipe, plan and its reasons, command line, code, environment, nodes. Never secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import msgspec
import tomli_w

from clustertrain import reading, schema
from clustertrain.config.parsing.documents import parse_toml
from clustertrain.errors import ClusterTrainError
from clustertrain.plan.layout import Layout
from clustertrain.report.html.text import clean
from clustertrain.run import attempts, json_files, rank_python
from clustertrain.run.run_dir import RunDir

MAX_DIFF_CHARACTERS = 200_000
_SECRET_KEY = re.compile(r"(?i)(^|_)(webhook|token|password|passwd|secret|api_?key|credentials?)$")
_PLAN_FACTS = ("device", "precision", "nodes", "gpus_per_node", "world_size", "batch", "memory", "time")


def describe(run: RunDir) -> dict[str, Any]:
    """Return the parts; one that cannot be read is null, and ``errors`` says why."""
    errors: list[str] = []

    def read(part: Callable[[], Any]) -> Any:
        try:
            return part()
        except (ClusterTrainError, OSError, ValueError) as e:
            errors.append(e.message if isinstance(e, ClusterTrainError) else str(e))
            return None

    def load(path: Any) -> dict[str, Any]:
        document, error = json_files.load_document(path)
        errors.extend([error] if error else [])
        return document

    spec = read(lambda: parse_toml(reading.read_text(run.spec), str(run.spec))) or {}
    record, plan = read(lambda: load(run.record)) or {}, read(lambda: load(run.plan)) or {}
    document = {
        "recipe_title": "Job and script" if "script" in spec else "Recipe",
        "recipe": read(lambda: tomli_w.dumps(redact(spec))) if spec else None,
        "environment": _list_environment(spec),
        "submission": _describe_submission(record),
        "code": _describe_code(record),
        "plan": read(lambda: _describe_plan(plan)) if plan else None,
        "packages": _strings(rank_python.load_newest(run).get("packages")) or _strings(record.get("packages")),
        "nodes": read(lambda: _list_nodes(run)) or [],
        "folder": str(run.path),
        "errors": [error.replace(f"{run.path}/", "") for error in errors],
    }
    return clean(document)


def redact(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the specification without the environment, and without values of keys that sound like a secret."""

    def without_secrets(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: "***" if _is_secret(k, v) else without_secrets(v) for k, v in value.items()}
        return [without_secrets(v) for v in value] if isinstance(value, list) else value

    redacted: dict[str, Any] = without_secrets({k: v for k, v in spec.items() if k not in ("env", "secret_env")})
    return redacted


def _is_secret(key: str, value: Any) -> bool:
    return isinstance(value, str) and value != "" and _SECRET_KEY.search(key) is not None


def _list_environment(spec: dict[str, Any]) -> list[str]:
    """Return the names of the variables that the user set for the run."""
    names = [*_strings(spec.get("secret_env")), *(spec["env"] if isinstance(spec.get("env"), dict) else ())]
    return sorted(set(names))


def _strings(value: Any) -> Any:
    """Return a list of texts, or an object of texts, without anything else in it."""
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if isinstance(v, str)}
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _describe_submission(record: dict[str, Any]) -> dict[str, Any]:
    argv = _strings(record.get("argv"))
    facts = {k: record.get(k) for k in ("time", "user", "host", "cwd", "clustertrain", "python", "kernel")}
    return {"command": shlex.join(argv) if argv else None, **facts}


def _describe_code(record: dict[str, Any]) -> dict[str, Any] | None:
    git = record.get("git")
    if not isinstance(git, dict) or not isinstance(git.get("commit"), str):
        return None
    diff = str(git.get("diff") or "")
    return {
        "commit": git["commit"],
        "branch": git.get("branch"),
        "repository": git.get("repository"),
        "dirty": bool(git.get("dirty")),
        "diff": diff[:MAX_DIFF_CHARACTERS],
        "diff_truncated": bool(git.get("diff_truncated")) or len(diff) > MAX_DIFF_CHARACTERS,
    }


def _describe_plan(plan: dict[str, Any]) -> dict[str, Any]:
    try:
        layout = schema.convert(plan.get("layout"), Layout).describe()
    except msgspec.ValidationError:  # from another version
        layout = None
    warnings = _strings(plan.get("warnings"))
    facts = {k: plan.get(k) for k in _PLAN_FACTS}
    return {
        "layout": layout,
        **facts,
        "training": _strings(plan.get("training")),
        "warnings": warnings,
        "reasons": [reason for reason in _strings(plan.get("reasons")) if reason not in warnings],
        "rejected": plan.get("rejected"),
        "runners_up": plan.get("runners_up"),
        "environment": [*_describe_settings(plan.get("nccl")), *_describe_settings(plan.get("env"))],
    }


def _describe_settings(group: object) -> list[dict[str, Any]]:
    settings = group.items() if isinstance(group, dict) else ()
    return [
        {"name": name, "value": setting.get("value"), "reason": setting.get("reason")}
        for name, setting in settings
        if isinstance(setting, dict)
    ]


def _list_nodes(run: RunDir) -> list[dict[str, Any]]:
    history = attempts.load_attempts(run)
    return [{"attempt": a.n, "job_id": a.job_id, "host": a.host, "nodes": list(a.nodes)} for a in history]
