"""What becomes of the commands of a batch script: the set-up before the training command, the command, the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from clustertrain.errors import UsageError
from clustertrain.submit.adopt.items import Assigned, Item
from clustertrain.submit.adopt.outcomes import MASK, Findings, OutcomeKind, is_secret
from clustertrain.submit.shell.expansion import Expansions

# torchrun's variables, and those of the frameworks for the same things.
OWN_VARIABLES = frozenset({
    "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "MASTER", "HEAD_NODE_IP",
})  # fmt: skip
_ADDRESS = re.compile(
    r"scontrol\s+show\s+hostname|SLURM_(?:JOB_)?NODELIST|\bhostname\b|\bgetent\b|MASTER_(?:ADDR|PORT)"
)
# Read by programs of the ranks alone, so that they may be set after the rest of the set-up.
_RUNTIME = re.compile(r"(NCCL|OMP|MKL|TORCH|PYTORCH|HF|TRANSFORMERS|WANDB|TOKENIZERS|UCX|FI|GLOO|TF|XLA|CUDA_DEVICE)_")
# Slurm's variables that differ in the job of a run, which has one task per node.
_CHANGED = re.compile(
    r"\$\{?(SLURM_(?:PROCID|LOCALID|NTASKS\w*|NPROCS|TASKS_PER_NODE|CPUS_PER_TASK|JOB_NAME|ARRAY_\w+|GPUS_PER_TASK)|[0-9@*]"
    r")(?!\w)"
)
_RELATIVE = re.compile(r"(?:^|\s)(?:source|\.|cd)\s+(?![/~$\"'-])\S|(?:^|[\s=:])\.{1,2}/|\$\(?\{?(?:PWD|pwd)\b")
_FILES = re.compile(
    r"[^#]*>\s*(?![/&$~(>])\S|\s*(?:cp|mkdir|rm|mv|ln|tar|rsync|unzip|touch|python\S*|bash|sh|wget|curl|git|pip|uv|make|srun)\s"
)
_REFERENCE = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\(\((.*?)\)\)", re.DOTALL)
_ACTIVATION = re.compile(r"\b(?:conda|mamba|micromamba|pyenv)\s+activate\b|/activate\b|\bspack\s+(?:load|env)\b")
_MODULE = re.compile(r"\b(?:module\s+(?:load|add)|ml)\b.*(?:python|torch|conda|mamba|forge)", re.IGNORECASE)
_ADDRESSES = "clustertrain sets the addresses and ports of the ranks"


@dataclass
class Body:
    """The commands of a script, sorted."""

    training: Item
    before: list[Item]
    after: list[Item]
    activations: list[Item] = field(default_factory=list)
    """Lines that choose the Python."""


def split_body(items: Sequence[Item], name: str) -> Body:
    """Find the training command among ``items``.

    Raises:
        UsageError: there is none, there are several, or it is inside a block.
    """
    end = next((i for i, item in enumerate(items) if item.kind == "exit" and not (item.block or item.before)), None)
    reached = list(items[:end]) if end is not None else list(items)
    unreached = [item for item in items[len(reached) :] if item.kind != "exit"]
    best = max((item.certainty for item in reached if item.kind == "training"), default=0)
    candidates = [item for item in reached if item.kind == "training" and item.certainty == best]
    if not candidates:
        raise UsageError(
            f"{name}: no training command, such as srun, torchrun, accelerate launch or python SCRIPT",
            fix="submit the program itself: clustertrain submit -- COMMAND",
        )
    if len(candidates) > 1:
        lines = ", ".join(str(item.line) for item in candidates[:10])
        raise UsageError(
            f"{name}: several training commands, on lines {lines}; a run has one",
            fix="adopt a copy of the script for each, submit a shell script (clustertrain submit -- bash SCRIPT), or "
            "keep the script and put `clustertrain wrap --` after each srun",
        )
    training = candidates[0]
    if training.notes or training.block:
        raise UsageError(
            f"{name}, line {training.line}: the training command is {training.notes[0]}",
            fix="put it outside: clustertrain starts the program again by itself after a preemption or a time limit; "
            "or keep the script and put `clustertrain wrap --` after srun",
        )
    at = next(index for index, item in enumerate(reached) if item is training)
    return Body(training, reached[:at], [*reached[at + 1 :], *unreached])


class BodySorter:
    """Decides what becomes of the items around the training command, and records it.

    Args of the constructor:
        base: the folder in which sbatch would be called, as a shell word.
    """

    def __init__(self, body: Body, expansions: Expansions, findings: Findings, base: str) -> None:
        self._body, self._expansions, self._findings, self._base = body, expansions, findings, base
        traps = [item for item in [*body.before, *body.after] if item.kind == "trap"]
        self._trapped = {name for item in traps for name in " ".join(item.words[1:]).split()}
        self._kept = {id(item) for item in body.before if self._is_setup(item)}
        kept = [index for index, item in enumerate(body.before) if id(item) in self._kept]
        self._last_kept = max(kept, default=-1)
        self._last_relative = max((index for index in kept if _is_relative(body.before[index].text)), default=-1)
        self._last_unknown = {
            a.name: index for index, item in enumerate(body.before) for a in item.assigned if not a.value.is_literal
        }
        self._addresses = self._find_addresses()
        self._used = self._find_used(self._names(body.training.text), body.before)
        self._needed: set[str] = set()

    def sort(self) -> None:
        self._needed = self._find_needed()
        for index, item in enumerate(self._body.before):
            self._sort_before(item, index)
        self._add_base()
        for item in self._body.after:
            self._sort_after(item)

    def add(self, item: Item, outcome: OutcomeKind, detail: str, text: str | None = None) -> None:
        shown = _one_line(self._expansions.show(text or item.text))
        self._findings.add(item.line, shown, outcome, self._expansions.show(detail))

    # -- which lines and variables stay

    def _is_setup(self, item: Item) -> bool:
        if self._is_trapped(item):
            return False
        return item.kind in ("setup", "set", "training", "exit") and (item.kind != "exit" or bool(item.block))

    def _is_trapped(self, item: Item) -> bool:
        """Return whether ``item`` is a function that a trap calls."""
        return item.block.startswith("function ") and item.block.split()[1].rstrip("()") in self._trapped

    def _names(self, text: str) -> set[str]:
        text = self._expansions.show(text)
        names = set(_REFERENCE.findall(text))
        for arithmetic in _ARITHMETIC.findall(text):
            names |= set(re.findall(r"[A-Za-z_]\w*", arithmetic))
        return names

    def _find_used(self, names: set[str], items: Sequence[Item]) -> set[str]:
        """Return ``names`` and what their values use in turn."""
        found = set(names)
        for item in reversed(items):
            for assigned in item.assigned:
                if assigned.name in found:
                    found |= self._names(assigned.text)
        return found

    def _find_needed(self) -> set[str]:
        """Return the variables that lines of the set-up use."""
        names: set[str] = set()
        for item in self._body.before:
            if id(item) in self._kept or (item.kind == "export" and not item.assigned):
                names |= self._names(item.text)
            for assigned in item.assigned:
                if assigned.is_exported and not self._is_own(assigned) and not assigned.value.is_literal:
                    names |= self._names(assigned.text)
        while True:
            more = self._find_used(names, self._body.before)
            if more == names:
                return names
            names = more

    def _is_own(self, assigned: Assigned) -> bool:
        """Return whether clustertrain does what the variable is for: addresses, sizes, and launchers with them."""
        if assigned.name in OWN_VARIABLES:
            return True
        text = self._expansions.show(assigned.text)
        return assigned.name in self._used and not assigned.value.is_literal and self._is_address(text)

    # -- before the training command

    def _sort_before(self, item: Item, index: int) -> None:
        if id(item) in self._kept:
            self._keep(item)
        elif item.kind == "cd":
            self._change_folder(item, index)
        elif item.kind in ("assign", "export"):
            self._assign(item, index)
        else:
            self._drop(item)

    def _keep(self, item: Item, detail: str = "") -> None:
        text = self._expansions.show(item.text)
        if item.kind == "set":
            text = _without_tracing(text)
            if not text:
                self.add(item, "dropped", "it would print secrets into job.log")
                return
        self._findings.setup += _setup_lines(text)
        if _ACTIVATION.search(text) or _MODULE.search(text):
            self._body.activations.append(item)
        self.add(item, "profile", detail or self._describe_setup(item))
        self._warn_changed(item, text)

    def _describe_setup(self, item: Item) -> str:
        if item.kind == "training":
            return "set-up: runs once before each start of the ranks, on the first node"
        return "set-up"

    def _warn_changed(self, item: Item, text: str) -> None:
        names = sorted(set(_CHANGED.findall(text)))
        if names:
            listed = ", ".join(f"${name}" for name in names)
            verb = "has" if len(names) == 1 else "have"
            self.add(item, "decide", f"{listed} {verb} another value, or none, in the job script of a run", listed)

    def _change_folder(self, item: Item, index: int) -> None:
        target = item.words[1] if len(item.words) == 2 else ""
        shown = self._expansions.find(target)
        if not target or target == "-":
            self.add(item, "decide", "submit in the folder in which the program shall run")
        elif any(not expansion.is_environment for expansion in shown):
            self.add(item, "decide", "ranks run where submit is called; let the program change to this folder")
        elif self._expansions.show(target).rstrip("/") in ("$PWD", "."):
            self.add(item, "replaced", "ranks run in the folder in which submit is called")
        else:
            self._findings.folders.append(self._expansions.quote(target))
            if self._last_relative > index:
                self._findings.setup += _setup_lines(self._expansions.show(item.text))
            self.add(item, "submit", "submit is called in this folder")

    def _assign(self, item: Item, index: int) -> None:
        if not item.assigned:
            self._keep(item, "set-up")
            return
        kept = []
        for assigned in item.assigned:
            if self._settle(item, assigned, index):
                kept.append(assigned)
        if kept:
            is_exported = kept[0].is_exported and item.kind == "export"
            text = f"export {' '.join(a.text for a in kept)}" if is_exported else " ".join(a.text for a in kept)
            if len(kept) == len(item.assigned):
                text = item.text
            text = self._expansions.show(text)
            self._findings.setup += _setup_lines(text)
            self.add(item, "profile", "set-up", text)
            self._warn_changed(item, text)

    def _settle(self, item: Item, assigned: Assigned, index: int) -> bool:
        """Record what becomes of one variable; return True if it belongs in the set-up."""
        name, value = assigned.name, assigned.value
        if self._is_own(assigned):
            detail = f"clustertrain sets {name}" if name in OWN_VARIABLES else _ADDRESSES
            self.add(item, "replaced", detail, assigned.text)
            return False
        if assigned.is_exported:
            if value.is_literal and not value.is_array and (is_secret(name) or self._may_be_last(name, index)):
                if self._findings.set_variable(name, value.text):
                    self.add(item, "profile", "[env]", f"{name}={value.text}")
                else:
                    detail = "a secret: --env takes it from your shell, where you set it"
                    self.add(item, "submit", detail, f"{name}={MASK}")
                return False
            self._findings.env.pop(name, None)
            return True
        if name in self._needed:
            return True
        text = self._expansions.show(assigned.text)
        if self._is_address(text):
            self.add(item, "replaced", _ADDRESSES, assigned.text)
        elif name in self._used:
            self.add(item, "submit", "the command uses it, with its value", assigned.text)
        else:
            self.add(item, "dropped", "nothing that is kept uses it", assigned.text)
        return False

    def _is_address(self, text: str) -> bool:
        return _ADDRESS.search(text) is not None or not self._addresses.isdisjoint(self._names(text))

    def _find_addresses(self) -> set[str]:
        """Return the variables whose values come from the names of the nodes."""
        found: set[str] = set()
        for assigned in (a for item in self._body.before for a in item.assigned):
            text = self._expansions.show(assigned.text)
            if _ADDRESS.search(text) or not found.isdisjoint(self._names(text)):
                found.add(assigned.name)
        return found

    def _may_be_last(self, name: str, index: int) -> bool:
        """Return whether ``name`` can be set after the set-up, where the profile's ``[env]`` is."""
        if name in self._needed or name.startswith("CLUSTERTRAIN_"):
            return False
        if self._last_unknown.get(name, -1) > index:
            return False
        return _RUNTIME.match(name) is not None or self._last_kept < index

    def _drop(self, item: Item) -> None:
        details: dict[str, tuple[OutcomeKind, str]] = {
            "monitor": ("replaced", "GPUs are recorded: clustertrain telemetry"),
            "trap": ("replaced", "stops reach the ranks as SIGTERM, and the run is requeued"),
            "requeue": ("replaced", "the run is requeued after a preemption, a time limit or a node failure"),
            "address": ("replaced", _ADDRESSES),
            "neutral": ("dropped", "not needed"),
            "print": ("dropped", "only prints"),
        }
        if item.kind == "chain":
            self._drop_chain(item)
        elif item.kind in details:
            self.add(item, *details[item.kind])
        else:
            self.add(item, "replaced", "stops reach the ranks as SIGTERM, and the run is requeued")

    def _drop_chain(self, item: Item) -> None:
        if re.search(r"SLURM_JOB_?ID|\$0|BASH_SOURCE|dependency", self._expansions.show(item.text)):
            self.add(item, "replaced", "no chain is needed: a run that reaches its time limit is requeued")
        else:
            self.add(item, "decide", "submits another job: do that yourself, with --dependency afterok:JOB if it waits")

    def _add_base(self) -> None:
        setup = self._findings.setup
        first = next((i for i, line in enumerate(setup) if re.match(r"\s*cd\s+[\"']?[/~$]", line)), len(setup))
        if any(_is_relative(line) for line in setup[:first]):
            setup.insert(0, f"cd {self._base}")
            detail = "set-up: relative paths in the lines after it start from this folder, as with sbatch"
            self._findings.add(0, f"cd {self._base}", "profile", detail)

    # -- after it

    def _sort_after(self, item: Item) -> None:
        training = self._body.training
        if item.before in ("|", "|&") and item.line >= training.line and training.after in ("|", "|&"):
            self.add(item, "replaced", "each rank has a log: clustertrain logs")
        elif item.kind in ("neutral", "print", "exit", "assign"):
            self.add(item, "dropped", "not needed" if item.kind != "assign" else "after the training")
        elif item.kind in ("monitor", "trap", "requeue", "chain") or self._is_trapped(item):
            self._drop(item)
        else:
            self.add(item, "decide", "runs after the training; a run executes nothing after it")


def _setup_lines(text: str) -> list[str]:
    """Return the lines of a command as lines of the set-up, with continuations joined."""
    if "<<" in text:  # the lines of a here-document stay as they are
        return text.split("\n")
    return [line for line in re.sub(r"[ \t]*\\\n[ \t]*", " ", text).split("\n") if line.strip()]


def _is_relative(text: str) -> bool:
    """Return whether a line of the set-up may depend on the folder in which it runs."""
    return _RELATIVE.search(text) is not None or _FILES.match(text) is not None


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"\\\n", " ", text).split())


def _without_tracing(text: str) -> str:
    """Return ``set`` without the options that print each line, secrets included."""
    words = text.split()
    kept = ["set"]
    skip = False
    for index, word in enumerate(words[1:], start=1):
        following = words[index + 1] if index + 1 < len(words) else ""
        if skip:
            skip = False
        elif re.fullmatch(r"-[a-zA-Z]+", word):
            flags = re.sub("[xv]", "", word[1:])
            skip = flags.endswith("o")
            names = skip and following and following not in ("xtrace", "verbose")
            flags = flags if names or not skip else flags[:-1]
            kept += [f"-{flags}"] if flags else []
            kept += [following] if names else []
        else:
            kept.append(word)
    return " ".join(kept) if len(kept) > 1 else ""
