"""The number of nodes, GPUs and cores of a run, from the directives, srun's options and the launcher's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clustertrain.submit.adopt.outcomes import Findings, OutcomeKind
from clustertrain.submit.adopt.program import Program
from clustertrain.submit.adopt.resources import Request
from clustertrain.submit.launchers.launcher_names import REPLACED

_SRUN_SIZES = ("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gpus-per-task", "gres", "gpus")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run."""

    nodes: int
    gpus: int
    """Per node; ranks per node if ``device`` is ``cpu``."""
    device: str
    """``cpu``, or empty for GPUs."""
    cpus_per_gpu: int
    """0: the site's default."""


def choose_sizes(request: Request, program: Program, line: int, findings: Findings) -> Sizes:
    """Return the sizes of the run; record questions about them for the command on ``line``."""
    return _Chooser(request, program, line, findings).choose()


class _Chooser:
    def __init__(self, request: Request, program: Program, line: int, findings: Findings) -> None:
        self._request, self._program, self._line, self._findings = request, program, line, findings
        self._sizes = request.sizes
        # What srun was given counts for the ranks, not for the nodes and cores of the job.
        step = {name: option.value for name, option in program.srun.items() if name in _SRUN_SIZES}
        self._step = {name: int(value) for name, value in step.items() if re.fullmatch(r"[1-9][0-9]{0,5}", value)}

    def choose(self) -> Sizes:
        nodes = self._choose_nodes()
        gpus = self._find_gpus(nodes)
        tasks = self._find_tasks(nodes, gpus)
        ranks = self._find_ranks(nodes, tasks)
        device = ""
        if gpus is None:
            device, count = "cpu", ranks or 1
            self._ask(
                "the script requests no GPUs, so the ranks run on CPUs; if GPUs come with the nodes of this partition, "
                "use --device cuda and --gpus with their number"
            )
        else:
            count = self._match_ranks(nodes, gpus, ranks)
        cpus = self._choose_cpus(nodes, count, gpus)
        self._record(nodes, gpus, count)
        return Sizes(nodes, count, device, cpus)

    def _ask(self, question: str) -> None:
        text = " ".join(self._program.words[:1]) or "the command"
        self._findings.add(self._line, text, "decide", question)

    def _choose_nodes(self) -> int:
        sizes, program = self._sizes, self._program
        if "nodes" in sizes:
            nodes = sizes["nodes"]
            given = program.nodes or self._step.get("nodes")
            if given is not None and given != nodes:
                self._ask(f"the job has {nodes} nodes, and the command uses {given}: all {nodes} get ranks here")
            return nodes
        per_node = sizes.get("gpus-per-node") or sizes.get("gres")
        ntasks = sizes.get("ntasks")
        guesses = [
            self._divide(ntasks, sizes.get("ntasks-per-node")),
            self._divide(sizes.get("gpus"), per_node),
            program.nodes,
            self._divide(ntasks, per_node) if program.launcher == "srun" else None,
        ]
        nodes = next((guess for guess in guesses if guess), 1)
        total = max(ntasks or 1, sizes.get("gpus", 1) if not per_node else 1)
        if total > 1 and not guesses[0] and not guesses[1]:
            self._ask(f"the script does not say how many nodes, and Slurm chooses: {nodes} is taken; change --nodes")
        return nodes

    def _divide(self, total: int | None, part: int | None) -> int | None:
        return total // part if total and part and total % part == 0 else None

    def _find_gpus(self, nodes: int) -> int | None:
        """Return the GPUs per node that the script requests; None if it requests none."""
        sizes = {**self._sizes, **{k: v for k, v in self._step.items() if k.startswith("gpus-per") or k == "gres"}}
        per_node = sizes.get("gpus-per-node") or sizes.get("gres")
        if per_node:
            return per_node
        if "gpus" in sizes:
            if sizes["gpus"] % nodes:
                self._ask(f"{sizes['gpus']} GPUs cannot be divided among {nodes} nodes; change --nodes and --gpus")
            return max(1, sizes["gpus"] // nodes)
        if "gpus-per-task" in sizes:
            return sizes["gpus-per-task"] * max(1, self._count_tasks(nodes) or 1)
        return None

    def _count_tasks(self, nodes: int) -> int | None:
        """Return the tasks per node that the directives, or srun, ask for."""
        for sizes in (self._step, self._sizes):
            if "ntasks-per-node" in sizes:
                return sizes["ntasks-per-node"]
            if "ntasks" in sizes:
                return max(1, sizes["ntasks"] // nodes)
        return None

    def _find_tasks(self, nodes: int, gpus: int | None) -> int:
        per_gpu = self._sizes.get("ntasks-per-gpu")
        return self._count_tasks(nodes) or (per_gpu * gpus if per_gpu and gpus else 1)

    def _find_ranks(self, nodes: int, tasks: int) -> int | None:
        """Return the ranks per node that the script starts; None if it is not known."""
        program = self._program
        if program.launcher in REPLACED:
            total = program.total and max(1, program.total // (program.nodes or nodes))
            return program.ranks_per_node or total or None
        if program.launcher == "mpirun":
            return program.ranks_per_node or (program.total and max(1, program.total // nodes)) or tasks
        return tasks if program.launcher == "srun" else 1

    def _match_ranks(self, nodes: int, gpus: int, ranks: int | None) -> int:
        """Return the number of ranks per node, with a question if it is not the script's."""
        launcher = self._program.launcher
        if ranks is None or ranks == gpus:
            if not launcher and nodes > 1:
                self._ask(f"the script starts one process; here each of the {nodes * gpus} GPUs gets one")
            return gpus
        if launcher in REPLACED:
            if ranks < gpus:
                self._ask(f"{launcher} starts {ranks} ranks on nodes with {gpus} GPUs: {ranks} GPUs are requested")
                return ranks
            self._ask(f"{launcher} starts {ranks} ranks for {gpus} GPUs per node; here each GPU has one")
            return gpus
        if not launcher:
            self._ask(
                f"the script starts one process for {nodes * gpus} GPUs, and here each GPU has one; use --gpus 1 if "
                "the program uses one GPU"
            )
        else:
            processes = f"{ranks} process{'es' * (ranks > 1)}"
            self._ask(f"the script starts {processes} per node for {gpus} GPUs; here each GPU has one")
        return gpus

    def _choose_cpus(self, nodes: int, ranks: int, gpus: int | None) -> int:
        sizes = self._sizes
        if "cpus-per-gpu" in sizes:
            self._add("cpus-per-gpu", "profile", "cpus_per_gpu")
            return sizes["cpus-per-gpu"] * (gpus or ranks) // ranks
        if "cpus-per-task" not in sizes:
            return 0
        per_gpu = sizes.get("ntasks-per-gpu")
        tasks = sizes.get("ntasks-per-node") or max(1, sizes.get("ntasks", 1) // nodes)
        tasks = per_gpu * gpus if per_gpu and gpus and "ntasks-per-node" not in sizes else tasks
        total = sizes["cpus-per-task"] * tasks
        cpus = max(1, total // ranks)
        rest = f"; {total} cores per node become {cpus * ranks}" if cpus * ranks != total else ""
        self._add("cpus-per-task", "profile", f"cpus_per_gpu = {cpus}{rest}")
        return cpus

    def _add(self, name: str, outcome: OutcomeKind, detail: str) -> None:
        directive = self._request.given[name]
        self._findings.add(directive.line, f"#SBATCH {directive.option.text}", outcome, detail)

    def _record(self, nodes: int, gpus: int | None, count: int) -> None:
        for name in self._sizes:
            if name == "nodes":
                self._add(name, "submit", f"--nodes {nodes}")
            elif name.startswith("gpus") or name == "gres":
                flag = "; gpus_flag of the profile" if name == "gres" else ""
                self._add(name, "submit", f"--gpus {count}{flag}")
            elif name.startswith("ntasks"):
                self._add(name, "submit", f"--gpus {count}: one rank per {'GPU' if gpus else 'process'}")
