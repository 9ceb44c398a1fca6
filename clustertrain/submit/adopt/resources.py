"""The options of a batch script as options of submit and keys of a profile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clustertrain.config.command_options import STOP_SIGNALS
from clustertrain.config.parsing.time_limits import parse_time_limit_s
from clustertrain.errors import UsageError
from clustertrain.submit.adopt.containers import Container, take_option
from clustertrain.submit.adopt.directives import Directive
from clustertrain.submit.adopt.outcomes import Findings, OutcomeKind

_PROFILE = frozenset({"partition", "account", "qos"})
_JOB = frozenset({"mem", "constraint", "exclude", "nodelist", "reservation"})
_SIZES = frozenset({
    "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "gpus", "gpus-per-node", "gpus-per-task", "gres",
    "cpus-per-task", "cpus-per-gpu",
})  # fmt: skip
_SPECIAL = frozenset({
    "time", "job-name", "chdir", "no-requeue", "signal", "array", "dependency", "clusters", "nodefile", "export",
})  # fmt: skip
_ONE_TASK = "a run has one task per node, and clustertrain binds its ranks"
_REPLACED = {
    "output": "each rank has a log (clustertrain logs), and the job has job.log",
    "error": "each rank has a log (clustertrain logs), and the job has job.log",
    "open-mode": "logs of later attempts follow those before",
    "requeue": "runs are requeued",
    "no-kill": "after a node failure the run is requeued",
    "gpu-bind": _ONE_TASK, "distribution": _ONE_TASK, "ntasks-per-core": _ONE_TASK, "ntasks-per-socket": _ONE_TASK,
    "overcommit": _ONE_TASK, "wait-all-nodes": "the ranks start when all nodes are there",
}  # fmt: skip
_DROPPED = {
    "parsable": "use submit --json", "quiet": "not needed", "verbose": "not needed", "wait": "use submit --wait",
    "test-only": "use submit --dry-run", "ignore-pbs": "not needed", "help": "not needed", "usage": "not needed",
    "version": "not needed", "immediate": "not an option of sbatch that has an effect",
    "input": "ranks read nothing from standard input", "uid": "submit as that user", "gid": "submit as that group",
    "get-user-env": "the job has the environment of the shell in which submit is called",
}  # fmt: skip
_REFUSED = {
    "gpus-per-socket": "clustertrain requests GPUs per node: use --gpus-per-node",
    "wrap": "it has no effect in a script",
    "tres-per-task": "clustertrain requests GPUs per node: use --gpus-per-node",
}
_MAX_SIGNAL_LEAD_S = 65_535
_SIGNAL_NAMES = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
_DEFAULT_SIGNAL_LEAD_S = 60  # of sbatch
_GPU_COUNT = re.compile(r"(?:([A-Za-z][\w.-]*)[:=])?(\d{1,6})(?:\(.*\))?")


@dataclass
class Request:
    """What the directives ask for."""

    job: dict[str, str] = field(default_factory=dict)
    """Options of submit by name, such as ``{"time": "1:00:00"}``."""
    sbatch: list[str] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Numbers of nodes, tasks, GPUs and cores by the names of their options; ``gres`` are GPUs per node."""
    given: dict[str, Directive] = field(default_factory=dict)
    """The directive of each size."""
    chdir: str = ""
    container: Container = field(default_factory=Container)

    def slurm_variables(self) -> dict[str, str]:
        """Return the variables of the batch script that follow from the directives."""
        sizes = self.sizes
        tasks = sizes.get("ntasks") or sizes.get("nodes", 0) * sizes.get("ntasks-per-node", 0)
        gpus = sizes.get("gpus-per-node") or sizes.get("gres")
        values = {
            "SLURM_NNODES": sizes.get("nodes"), "SLURM_JOB_NUM_NODES": sizes.get("nodes"),
            "SLURM_CPUS_PER_TASK": sizes.get("cpus-per-task"), "SLURM_NTASKS_PER_NODE": sizes.get("ntasks-per-node"),
            "SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks, "SLURM_GPUS_ON_NODE": gpus, "SLURM_GPUS_PER_NODE": gpus,
            "SLURM_CPUS_PER_GPU": sizes.get("cpus-per-gpu"),
        }  # fmt: skip
        known = {name: str(value) for name, value in values.items() if value}
        if "name" in self.job:
            known["SLURM_JOB_NAME"] = self.job["name"]
        return known


def read_request(directives: Sequence[Directive], name: str, findings: Findings) -> Request:
    """Return what the directives ask for, and record what becomes of each.

    Raises:
        UsageError: an option has a value that sbatch does not take, or cannot be honored.
    """
    return _Reader(name, findings).read(directives)


class _Reader:
    def __init__(self, name: str, findings: Findings) -> None:
        self._name, self._findings = name, findings
        self._request = Request()

    def read(self, directives: Sequence[Directive]) -> Request:
        last = {directive.option.name: directive for directive in directives}
        if "mem" in last or "mem-per-cpu" in last or "mem-per-gpu" in last:
            memory = [d for d in directives if d.option.name in ("mem", "mem-per-cpu", "mem-per-gpu")]
            last |= {d.option.name: memory[-1] for d in memory}
        for directive in directives:
            final = last[directive.option.name]
            if final is directive:
                self._read_option(directive)
            else:
                self._add(directive, "dropped", f"line {final.line} sets it again")
        return self._request

    def _add(self, directive: Directive, outcome: OutcomeKind, detail: str) -> None:
        self._findings.add(directive.line, f"#SBATCH {directive.option.text}", outcome, detail)

    def _error(self, directive: Directive, problem: str, fix: str) -> UsageError:
        return UsageError(f"{self._name}, line {directive.line}: {directive.option.text}: {problem}", fix=fix)

    def _read_option(self, directive: Directive) -> None:
        name, value, request = directive.option.name, directive.option.value, self._request
        special = getattr(self, f"_read_{name.replace('-', '_')}") if name in _SPECIAL else None
        if name in _REFUSED:
            raise self._error(directive, "cannot be honored", _REFUSED[name])
        if name.removeprefix("no-").startswith("container"):
            place = f"{self._name}, line {directive.line}: {directive.option.text}"
            take_option(request.container, name, value, place)
            self._add(directive, "submit", "--container")
            return
        if name in _SIZES:
            self._read_size(directive)
        elif special is not None:
            special(directive)
        elif name in _REPLACED:
            self._add(directive, "replaced", _REPLACED[name])
        elif name in _DROPPED:
            self._add(directive, "dropped", _DROPPED[name])
        elif name in _PROFILE:
            request.profile[name] = self._require(directive)
            self._add(directive, "profile", f"{name} of the profile")
        elif name in _JOB:
            request.job[name] = self._require(directive)
            self._add(directive, "submit", f"--{name}")
        else:
            self._pass(directive, name, value)

    def _pass(self, directive: Directive, name: str, value: str) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            raise self._error(directive, "not an option of sbatch", "remove it")
        self._request.sbatch.append(f"{name}={value}" if value else name)
        if directive.option.is_known:
            self._add(directive, "submit", "--sbatch")
        else:
            self._add(directive, "decide", "passed with --sbatch as it is; clustertrain does not know this option")

    def _require(self, directive: Directive) -> str:
        value = directive.option.value
        if not value or any(ord(c) < 32 or ord(c) == 127 for c in value):
            raise self._error(directive, "has no usable value", "write one, or remove the option")
        if "$" in value:
            self._add(directive, "decide", "sbatch expands no variables in directives: write the value")
        return value

    # -- options with a meaning of their own

    def _read_time(self, directive: Directive) -> None:
        try:
            parse_time_limit_s(self._require(directive))
        except UsageError as e:
            raise self._error(directive, "not in a format that sbatch accepts", e.fix or "") from e
        self._request.job["time"] = directive.option.value
        self._add(directive, "submit", "--time")

    def _read_job_name(self, directive: Directive) -> None:
        self._request.job["name"] = self._require(directive)
        self._add(directive, "submit", "--name: the first part of the run id, which is the job's name")

    def _read_chdir(self, directive: Directive) -> None:
        self._request.chdir = self._require(directive)
        self._add(directive, "submit", "submit is called in this folder")

    def _read_no_requeue(self, directive: Directive) -> None:
        self._request.job["max-requeues"] = "0"
        self._add(directive, "submit", "--max-requeues 0: without it, the run continues after a preemption")

    def _read_signal(self, directive: Directive) -> None:
        match = re.fullmatch(r"(?:([RB]+):)?(\w+)(?:@(\d{1,6}))?", self._require(directive))
        if match is None:
            raise self._error(directive, "not in a format that sbatch accepts", "use [R|B:]SIGNAL[@SECONDS]")
        lead = min(max(1, int(match[3] or _DEFAULT_SIGNAL_LEAD_S)), _MAX_SIGNAL_LEAD_S)
        self._request.profile["signal_lead_s"] = lead
        self._add(directive, "profile", f"signal_lead_s: stops begin {lead} s before the time limit")
        if "B" not in (match[1] or ""):
            self._read_stop_signal(directive, match[2].upper().removeprefix("SIG"))

    def _read_stop_signal(self, directive: Directive, signal: str) -> None:
        name = _SIGNAL_NAMES.get(signal, signal)
        if name == "TERM":
            return
        if name in STOP_SIGNALS:
            self._request.job["stop-signal"] = name
            self._add(directive, "submit", f"--stop-signal {name}: at each stop, also a preemption, to the program")
        else:
            self._add(
                directive, "decide",
                f"a program that handles {name} itself gets SIGTERM instead; Trainer, Lightning and Accelerate need no "
                "handler",
            )  # fmt: skip

    def _read_array(self, directive: Directive) -> None:
        value = self._require(directive)
        if value.endswith("%1"):
            self._add(directive, "replaced", "a chain of tasks, one at a time: the run is requeued at its time limit")
        else:
            self._add(
                directive, "decide",
                "one run is submitted; `clustertrain sweep --grid env.NAME=V,V` submits one per value, as a job array",
            )  # fmt: skip

    def _read_dependency(self, directive: Directive) -> None:
        parts = re.split(r"([,?])", self._require(directive))
        kept = [part for part in parts[::2] if part != "singleton"]
        if len(kept) < len(parts[::2]):
            self._add(directive, "replaced", "singleton: a run is one job that is requeued, so jobs do not overlap")
        if kept:
            self._request.job["dependency"] = (parts[1] if len(parts) > 1 else ",").join(kept)
            self._add(directive, "submit", "--dependency; a chain is not needed, the run is requeued")

    def _read_clusters(self, directive: Directive) -> None:
        self._add(directive, "decide", "submit on a login node of that cluster")

    def _read_nodefile(self, directive: Directive) -> None:
        self._add(directive, "decide", "list the nodes with --nodelist")

    def _read_export(self, directive: Directive) -> None:
        pairs = [part.partition("=") for part in self._require(directive).split(",")]
        names = [name for name, _, _ in pairs]
        if "ALL" not in names:
            self._pass(directive, "export", directive.option.value)
            return
        assigned = {name: value for name, separator, value in pairs if separator}
        for name, value in assigned.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise self._error(directive, f"{name!r} is not the name of a variable", "correct it")
            self._findings.set_variable(name, value)
        detail = "[env]" if assigned else "the job has the environment of the shell in which submit is called"
        self._add(directive, "profile" if assigned else "replaced", detail)

    # -- sizes

    def _read_size(self, directive: Directive) -> None:
        name, value, request = directive.option.name, self._require(directive), self._request
        request.given[name] = directive
        if name == "gres":
            self._read_gres(directive, value)
            return
        if name.startswith("gpus"):
            match = _GPU_COUNT.fullmatch(value)
            if match is None or match[2].strip("0") == "":
                raise self._error(directive, "not a number of GPUs of one type", "use [TYPE:]NUMBER")
            if match[1]:
                request.profile["gpu_type"] = match[1]
            number = match[2]
        elif name == "nodes" and re.fullmatch(r"\d{1,6}-\d{1,6}", value):
            number, most = value.split("-")
            if number != most:
                self._add(directive, "decide", f"a run has a fixed number of nodes: {number} is taken, not {most}")
        else:
            number = value
        if not re.fullmatch(r"[0-9]{1,6}", number) or int(number) == 0:
            raise self._error(directive, "not a positive number", "write a number")
        request.sizes[name] = int(number)

    def _read_gres(self, directive: Directive, value: str) -> None:
        """Read ``gpu``, ``gpu:4``, ``gpu:a100:4`` and other resources, separated by commas."""
        others, gpus = [], 0
        for part in re.split(r",(?![^(]*\))", value):
            fields = re.sub(r"\(.*\)$", "", part.removeprefix("gres/")).replace("=", ":").split(":")
            if fields[0] != "gpu":
                others.append(part)
                continue
            if gpus:
                raise self._error(directive, "GPUs of several types", "ask for one type: all nodes of a run are alike")
            count = fields.pop() if len(fields) > 1 and fields[-1].isdecimal() else "1"
            if len(fields) > 2 or not re.fullmatch(r"[0-9]{1,6}", count) or int(count) == 0:
                raise self._error(directive, "not a number of GPUs of one type", "use gpu:[TYPE:]NUMBER")
            gpus = int(count)
            if len(fields) == 2:
                self._request.profile["gpu_type"] = fields[1]
        if gpus:
            self._request.sizes["gres"] = gpus
            self._request.profile["gpus_flag"] = "gres"
        if others:
            self._request.sbatch.append(f"gres={','.join(others)}")
            if not gpus:
                self._add(directive, "submit", "--sbatch")
