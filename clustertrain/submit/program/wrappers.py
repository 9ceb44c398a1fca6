"""Programs that run another one, whose command line follows theirs: ``env A=1``, ``nice``, ``uv run``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

CONTAINER_RUNTIMES = frozenset({
    "apptainer", "ch-run", "docker", "enroot", "nerdctl", "podman", "shifter", "singularity"
})  # fmt: skip
MODULE_OPTIONS = ("-m", "--module")  # of `uv run`
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SPLIT_STRING = re.compile(r"(?:-[A-Za-z0]*S|--split-string=?)(.*)", re.DOTALL)


@dataclass(frozen=True)
class _Wrapper:
    """The command line of a wrapper up to the program."""

    valued: frozenset[str] = frozenset()
    """Options whose value is the next word."""
    folder: frozenset[str] = frozenset()
    """Those that change the folder in which the program runs."""
    subcommands: frozenset[str] = frozenset()
    """Those after which the program follows; one is needed."""
    positional: int = 0
    """Arguments before the program."""
    is_tool_runner: bool = False
    """It makes an environment for one program when that starts, so the ranks cannot use the same one."""
    is_lock: bool = False


def _wrapper(
    valued: str = "", folder: str = "", subcommands: str = "", positional: int = 0, *, is_tool_runner: bool = False,
    is_lock: bool = False,
) -> _Wrapper:  # fmt: skip
    folders = frozenset(folder.split())
    return _Wrapper(
        frozenset(valued.split()) | folders,
        folders,
        frozenset(subcommands.split()),
        positional,
        is_tool_runner,
        is_lock,
    )


_UVX = _wrapper(
    "--from --with -w --with-editable --with-requirements -c --constraints -b --build-constraints --overrides "
    "--env-file --python-platform --torch-backend -i --index --default-index --index-url --extra-index-url -f "
    "--find-links -P --upgrade-package --index-strategy --keyring-provider --resolution --prerelease --exclude-newer "
    "--reinstall-package --refresh-package --link-mode -C --config-setting -p --python --color --project "
    "--config-file --cache-dir",
    "--directory", is_tool_runner=True,
)  # fmt: skip
_CONDA = _wrapper("-n --name -p --prefix -e --env -a --attach -r --root-prefix", "--cwd", "run")
WRAPPERS = {
    "catchsegv": _wrapper(),
    "chrt": _wrapper("-T -P -D", positional=1),
    "compute-sanitizer": _wrapper("--tool --log-file --save --launch-timeout --target-processes"),
    "conda": _CONDA,
    "env": _wrapper("-u --unset -S --split-string", "-C --chdir"),
    "flock": _wrapper("-w --wait --timeout -E --conflict-exit-code", positional=1, is_lock=True),
    "hatch": _wrapper("-e --env -p --project --data-dir --cache-dir --config", subcommands="run"),
    "ionice": _wrapper("-c --class -n --classdata"),
    "ltrace": _wrapper("-a -A -D -e -F -l -n -o -p -s -u -w -x"),
    "mamba": _CONDA,
    "micromamba": _CONDA,
    "ncu": _wrapper("-o --export -k --kernel-name -c --launch-count -s --launch-skip --set --section --metrics"),
    "nice": _wrapper("-n --adjustment"),
    "nohup": _wrapper(),
    "nsys": _wrapper("-o -t -w -s -c -f -y -d -x -n -e -b -g --output --trace", subcommands="profile launch"),
    "numactl": _wrapper(
        "-i --interleave -p --preferred -C --physcpubind -N --cpunodebind -m --membind -w --weighted-interleave"
    ),
    "pdm": _wrapper("-c --config --venv", "-p --project", "run"),
    "perf": _wrapper("-e --event -o --output -F --freq -p -t -C --cpu -g --call-graph", subcommands="record stat"),
    "pipenv": _wrapper(subcommands="run"),
    "pipx": _wrapper("--spec --python -i --index-url --pip-args --backend", subcommands="run", is_tool_runner=True),
    "pixi": _wrapper("-e --environment --color --platform", "--manifest-path -m", "run"),
    "poetry": _wrapper("-P --project", "-C --directory", "run"),
    "prlimit": _wrapper(),
    "py-spy": _wrapper("-o --output -f --format -d --duration -r --rate", subcommands="record"),
    "rye": _wrapper("--pyproject", subcommands="run"),
    "setsid": _wrapper(),
    "stdbuf": _wrapper("-i --input -o --output -e --error"),
    "strace": _wrapper("-a -b -e -E -I -o -O -p -P -s -S -u -U -X --trace --output --attach --env"),
    "taskset": _wrapper(positional=1),
    "time": _wrapper("-f --format -o --output"),
    "timeout": _wrapper("-s --signal -k --kill-after", positional=1),
    "uv": _wrapper(
        "--extra --no-extra --group --no-group --only-group --env-file -w --with --with-editable --with-requirements "
        "--package --no-install-package -p --python -i --index --default-index --index-url --extra-index-url "
        "-f --find-links -P --upgrade-package --upgrade-group --index-strategy --keyring-provider --resolution "
        "--prerelease --exclude-newer --reinstall-package --refresh-package --link-mode -C --config-setting "
        "--no-build-package --no-binary-package --color --allow-insecure-host --project --config-file --cache-dir "
        "--python-platform",
        "--directory", "run",
    ),
    "uvx": _UVX,
    "xvfb-run": _wrapper(
        "-e --error-file -f --auth-file -n --server-num -p --xauth-protocol -s --server-args -w --wait"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A wrapper in a command."""

    name: str
    wrapper: _Wrapper
    options: tuple[str, ...]
    """The words between it and what it runs."""


@dataclass(frozen=True)
class InnerProgram:
    """The program behind the wrappers of a command."""

    index: int
    """Of its first word; 0: the command starts with it. ``uv run -m MODULE`` starts with ``-m``."""
    steps: tuple[Step, ...] = ()
    """The wrappers, the first one first."""

    @property
    def changes_folder(self) -> bool:
        """Whether it runs in another folder."""
        return any(option.partition("=")[0] in step.wrapper.folder for step in self.steps for option in step.options)

    def find_split_string(self) -> str:
        """Return the command line in an option of ``env -S``; empty: there is none."""
        for step in self.steps:
            for index, option in enumerate(step.options if step.name == "env" else ()):
                if match := _SPLIT_STRING.fullmatch(option):
                    return match[1] or " ".join(step.options[index + 1 :])
        return ""


def find_program(command: Sequence[str], is_launcher: Callable[[Sequence[str]], bool] | None = None) -> InnerProgram:
    """Return where the program of ``command`` starts.

    Args:
        is_launcher: whether words start with a launcher. An option that is not known may have a value; it has one if a
            launcher follows the next word.
    """
    index, steps = 0, list[Step]()
    while (wrapper := WRAPPERS.get(name := PurePath(command[index]).name)) is not None:
        first = index + 1
        if name == "uv" and list(command[first : first + 2]) == ["tool", "run"]:
            name, wrapper, first = "uv tool run", _UVX, first + 2
        start = _skip_options(wrapper, command, first, is_launcher)
        options = tuple(command[first:start])
        if wrapper.subcommands and wrapper.subcommands.isdisjoint(options):
            break  # `uv sync`
        steps.append(Step(name, wrapper, options))
        if start >= len(command):
            break
        index = start
    return InnerProgram(index, tuple(steps))


def _skip_options(
    wrapper: _Wrapper, command: Sequence[str], index: int, is_launcher: Callable[[Sequence[str]], bool] | None
) -> int:
    """Return the index after the options, the subcommand and the arguments that stand before the program."""
    needs_subcommand, positional = bool(wrapper.subcommands), wrapper.positional
    while index < len(command):
        word = command[index]
        if word == "--":
            return index + 1
        if word in MODULE_OPTIONS and wrapper is WRAPPERS["uv"] and not needs_subcommand:
            return index
        if word.startswith("-"):
            following = command[index + 2 :]
            has_value = word in wrapper.valued or bool(
                following and is_launcher and not positional and "=" not in word and is_launcher(following)
                and not is_launcher(command[index + 1 :]) and not command[index + 1].startswith("-")
            )  # fmt: skip
            index += 2 if has_value else 1
        elif needs_subcommand:
            if word not in wrapper.subcommands:
                return index
            needs_subcommand = False
            index += 1
        elif wrapper is WRAPPERS["env"] and _ASSIGNMENT.fullmatch(word):
            index += 1
        elif positional:
            positional -= 1
            index += 1
        else:
            return index
    return index
