"""A batch script as a cluster profile and a submit line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import tomli_w

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.parsing.documents import build
from clustertrain.errors import UsageError
from clustertrain.submit.adopt.body import OWN_VARIABLES, Body, BodySorter, split_body
from clustertrain.submit.adopt.containers import Container, translate_mounts
from clustertrain.submit.adopt.directives import parse_directives
from clustertrain.submit.adopt.items import Item, ItemReader
from clustertrain.submit.adopt.outcomes import Findings, Outcome
from clustertrain.submit.adopt.program import Program, read_launcher
from clustertrain.submit.adopt.resources import Request, read_request
from clustertrain.submit.adopt.script_file import find_interpreter
from clustertrain.submit.adopt.sizes import Sizes, choose_sizes
from clustertrain.submit.launchers.hidden_launchers import find_hidden_launcher
from clustertrain.submit.program.python_words import is_python
from clustertrain.submit.shell.expansion import Expansions, Scope
from clustertrain.submit.shell.words import Source

_MAX_SCRIPT_BYTES = 1 << 20
_RANK_VARIABLES = re.compile(r"\b(SLURM_PROCID|SLURM_LOCALID|SLURM_NTASKS|SLURM_NODEID|OMPI_COMM_WORLD_\w+)\b")
_APPTAINER_VARIABLE = re.compile(r"^(?:APPTAINER|SINGULARITY)ENV_(?=\w)")
_VENV = re.compile(r"(?:source|\.) ([^$]+)/bin/activate")


@dataclass(frozen=True)
class Adoption:
    """What a batch script becomes."""

    script: str
    profile_name: str
    profile: dict[str, Any]
    """Keys of the cluster profile; empty: none is needed."""
    profile_text: str
    argv: tuple[str, ...]
    """The submit command. What only a shell can expand stands as in the script."""
    submit: str
    """The submit command for a shell, with the change of the folder."""
    outcomes: tuple[Outcome, ...]
    """By line; questions come after the lines."""

    @property
    def questions(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.outcome == "decide")


def adopt(text: str, script: str, profile_name: str, cwd: Path) -> Adoption:
    """Return what the batch script ``text`` becomes. Nothing of it is executed.

    Args:
        script: the name of the script for messages.
        cwd: the folder from which it would be submitted.

    Raises:
        UsageError: it cannot be parsed, has no training command or several, or asks for what cannot be honored.
    """
    findings, expansions = Findings(), Expansions()
    directives, ignored = parse_directives(text, script)
    findings.outcomes += ignored
    request = read_request(directives, script, findings)
    _read_interpreter(text, findings)
    source = Source(text, script)
    reader = ItemReader(Scope(request.slurm_variables(), expansions), expansions)
    body = split_body(list(reader.read(source)), script)
    program = body.training.program
    if program is None:  # a training command always has one; a block has been refused
        raise UsageError(f"{script}, line {body.training.line}: no command", fix="submit the program itself")
    if request.container.list_options():
        program.container = (program.container or Container()).merge(request.container)
    try:
        read_launcher(program)
    except UsageError as e:
        raise reader.at_line(e, source, body.training.line) from e
    sorter = BodySorter(body, expansions, findings, shlex.quote(str(cwd)))
    sorter.sort()
    sizes = choose_sizes(request, program, body.training.line, findings)
    composer = _Composer(request, sizes, body, program, expansions, findings, sorter, cwd)
    return composer.compose(script, profile_name)


def _read_interpreter(text: str, findings: Findings) -> None:
    words = find_interpreter(text)
    line = text.split("\n", 1)[0]
    if not words:
        findings.add(1, line, "dropped", "sbatch would refuse a script without a first line such as #!/bin/bash")
        return
    flags = "".join(word[1:] for word in words[1:] if re.fullmatch(r"-[A-Za-z]+", word))
    if "l" in flags or "--login" in words:
        findings.setup.append("source /etc/profile")
        findings.add(1, line, "profile", "set-up: source /etc/profile, as a login shell does")
    if "e" in flags:
        findings.setup.append("set -e")
        findings.add(1, line, "profile", "set-up: set -e")
    if PurePath(words[0]).name not in ("bash", "sh", "dash"):
        findings.add(1, line, "decide", "the job script of a run is one for bash, which executes the set-up")


class _Composer:
    def __init__(
        self, request: Request, sizes: Sizes, body: Body, program: Program, expansions: Expansions,
        findings: Findings, sorter: BodySorter, cwd: Path,
    ) -> None:  # fmt: skip
        self._request, self._sizes, self._body, self._program = request, sizes, body, program
        self._expansions, self._findings, self._sorter, self._cwd = expansions, findings, sorter, cwd

    def compose(self, script: str, profile_name: str) -> Adoption:
        training = self._body.training
        self._take_env(training)
        if self._program.container is not None:
            self._take_container_env(self._program.container)
        command = self._choose_python()
        self._check_shell_script(script, training)
        self._report_training(training, command)
        profile = self._build_profile()
        text = _format_profile(profile, script) if profile else ""
        options = self._list_options(profile_name if profile else "")
        words = ["clustertrain", "submit", *options, "--", *command]
        folders = [*([shlex.quote(self._request.chdir)] if self._request.chdir else []), *self._findings.folders]
        lead = "".join(f"cd {folder} && " for folder in folders)
        secrets = [f'--env {self._name_in_container(name)}="${name}"' for name in self._findings.secrets]
        line = " ".join(map(self._expansions.quote, ["clustertrain", "submit", *options]))
        tail = " ".join(map(self._expansions.quote, command))
        self._ask_about(words)
        argv = [
            *words[: len(options) + 2],
            *(f"--env={self._name_in_container(name)}=${name}" for name in self._findings.secrets),
            "--",
            *command,
        ]
        return Adoption(
            script=script,
            profile_name=profile_name,
            profile=profile,
            profile_text=text,
            argv=tuple(self._expansions.show(word) for word in argv),
            submit=f"{lead}{' '.join([line, *secrets])} -- {tail}",
            outcomes=tuple(_order(self._findings.outcomes)),
        )

    def _take_env(self, training: Item) -> None:
        """Move assignments before the command to the profile."""
        for text in self._program.env:
            name, _, value = text.partition("=")
            if name in OWN_VARIABLES:
                continue
            if self._expansions.find(value):
                self._sorter.add(training, "decide", "set before the command: pass its value with --env", text)
            else:
                self._findings.set_variable(name, value)

    def _take_container_env(self, container: Container) -> None:
        """Read the variables that give Apptainer variables and mounts."""
        env = self._findings.env
        for name in list(env):
            if (inside := self._name_in_container(name)) != name:
                env[inside] = env.pop(name)
            elif name in ("APPTAINER_BIND", "APPTAINER_BINDPATH", "SINGULARITY_BIND", "SINGULARITY_BINDPATH"):
                container.mounts += translate_mounts(env.pop(name), name)

    def _name_in_container(self, name: str) -> str:
        """Return the variable that Apptainer sets from ``name`` in its containers."""
        return name if self._program.container is None else _APPTAINER_VARIABLE.sub("", name)

    def _choose_python(self) -> list[str]:
        """Return the command, with the Python of a virtual environment that the script activates by its path."""
        command, activations = list(self._program.words), self._body.activations
        if self._program.container is not None:
            return command
        if not command or not (is_python(command[0]) or command[0] in ("accelerate", "conda", "uv")):
            return command
        if "/" in command[0] or not activations:
            return command
        last = activations[-1]
        text = re.sub(r"\$\{?HOME\}?", lambda _: str(Path.home()), self._expansions.show(" ".join(last.words)))
        match = _VENV.fullmatch(text)
        if match is not None:
            beside = self._cwd.joinpath(self._request.chdir, match[1], "bin", command[0])
            try:
                exists = beside.is_file()
            except OSError:
                exists = False
            if exists:
                return [str(beside), *command[1:]]
        self._sorter.add(
            last, "decide",
            f"submit takes {command[0]} from the shell in which it is called: run this line there first",
        )  # fmt: skip
        return command

    def _folders(self) -> list[str]:
        words = [shlex.split(folder) for folder in self._findings.folders if "$" not in folder]
        return [word for group in words for word in group]

    def _report_training(self, training: Item, command: list[str]) -> None:
        program, start = self._program, _first_words(training.text)
        self._sorter.add(training, "submit", "the command: " + self._expansions.show(" ".join(command)))
        container = program.container
        if container is not None:
            self._sorter.add(training, "submit", self._expansions.show(" ".join(container.list_options())), start)
        if program.replaced:
            self._sorter.add(training, "replaced", "; ".join(program.replaced), start)
        if training.writes_file or training.after in ("|", "|&"):
            self._sorter.add(training, "replaced", "output: each rank has a log (clustertrain logs)", start)
        if training.reads_file or training.before in ("|", "|&"):
            self._sorter.add(training, "decide", "ranks read nothing from standard input", start)
        for warning in [*program.warnings, *(container.warnings if container else ())]:
            self._sorter.add(training, "decide", warning, start)
        self._check_program_file(training, command)

    @property
    def _program_folder(self) -> Path:
        return self._cwd.joinpath(self._request.chdir, *self._folders())

    def _check_shell_script(self, script: str, training: Item) -> None:
        """Refuse a command that runs a shell script with a launcher in it, and ask about one under a condition.

        Raises:
            UsageError: there is one.
        """
        if self._program.container is not None or not self._program.words:
            return
        found = find_hidden_launcher(self._program.words, self._program_folder)
        if found is None:
            return
        if not found.script:
            raise UsageError(
                f"{script}, line {training.line}: {found.name} inside {found.holder}: each rank would start it again",
                fix=f"write it without {found.holder}",
            )
        if found.is_conditional:
            self._sorter.add(training, "decide", f"{found.place}: each rank that gets here starts {found.name} again")
            return
        raise UsageError(
            f"{script}, line {training.line}: it runs {found.script}, whose line {found.line} starts {found.name}: "
            f"{found.text}",
            fix=f"adopt a copy of {found.script} with the #SBATCH lines; or keep both scripts, and put `clustertrain "
            f"wrap --` before {found.name} in {found.script}",
        )

    def _check_program_file(self, training: Item, command: list[str]) -> None:
        """Look for Slurm's variables in the program: its ranks are not tasks of Slurm."""
        path = next((word for word in command if word.endswith(".py")), None)
        if path is None or self._program.launcher not in ("srun", "mpirun", ""):
            return
        try:
            with (self._program_folder / path).open("rb") as stream:
                names = sorted(set(_RANK_VARIABLES.findall(stream.read(_MAX_SCRIPT_BYTES).decode(errors="replace"))))
        except (OSError, ValueError):
            return
        if names:
            detail = f"the program reads {', '.join(names)}: let it read RANK, LOCAL_RANK and WORLD_SIZE"
            self._sorter.add(training, "decide", detail, path)

    def _build_profile(self) -> dict[str, Any]:
        sizes = self._sizes
        profile: dict[str, Any] = {"setup": self._findings.setup} if self._findings.setup else {}
        profile |= self._request.profile
        if sizes.device:
            profile["device"] = sizes.device
        if sizes.cpus_per_gpu:
            profile["cpus_per_gpu"] = sizes.cpus_per_gpu
        env = {name: self._expansions.show(value) for name, value in self._findings.env.items()}
        return {**profile, **({"env": env} if env else {})}

    def _list_options(self, cluster: str) -> list[str]:
        sizes = self._sizes
        options = ["--cluster", cluster] if cluster else []
        options += ["--nodes", str(sizes.nodes), "--gpus", str(sizes.gpus)]
        for name, value in self._request.job.items():
            options += [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]
        if self._program.container is not None:
            options += self._program.container.list_options()
        for text in self._request.sbatch:
            options += ["--sbatch", text]
        return options

    def _ask_about(self, words: Sequence[str]) -> None:
        """Record the parts of the submit line that only the user, or a shell, can fill in."""
        for expansion in {item: None for word in words for item in self._expansions.find(word)}:
            if self._findings.folders and expansion.text.strip("${()}").lower() == "pwd":
                detail = "in the command: another folder after the cd of the submit line; write its path"
                self._findings.add(expansion.line, expansion.text, "decide", detail)
            if expansion.reason:
                detail = f"in the command: {expansion.reason}"
                if not expansion.is_environment:
                    detail += "; write its value, or submit a shell script: -- bash SCRIPT"
                self._findings.add(expansion.line, " ".join(expansion.text.split()), "decide", detail)


def _first_words(text: str) -> str:
    words = text.split()
    return " ".join(words[:2]) + (" …" if len(words) > 2 else "")


def _order(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes by line, each once; questions last."""
    return sorted(dict.fromkeys(outcomes), key=lambda outcome: (outcome.outcome == "decide", outcome.line))


def _format_profile(profile: dict[str, Any], script: str) -> str:
    """Return the text of the profile.

    Raises:
        ConfigError: a value is not one that a profile takes.
    """
    build(profile, ClusterProfile, script)
    name = "".join(c if c.isprintable() else " " for c in script)
    return f"# Written by `clustertrain adopt` from {name}.\n{tomli_w.dumps(profile)}"
