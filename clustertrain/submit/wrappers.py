"""Programs that run another one, whose command line follows theirs: ``env A=1``, ``nice``, ``uv run``, ``bash -c``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from clustertrain import proc

CONTAINER_RUNTIMES = frozenset({
    "apptainer", "ch-run", "docker", "enroot", "nerdctl", "podman", "shifter", "singularity"
})  # fmt: skip
MODULE_OPTIONS = ("-m", "--module")  # of `uv run`
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# Words of a shell after which a command follows.
_KEYWORDS = frozenset({"!", "do", "else", "elif", "exec", "if", "then", "time", "until", "while", "{"})
_OPERATORS = "();&|\n"


@dataclass(frozen=True)
class _Wrapper:
    """The command line of a wrapper up to the program."""

    valued: frozenset[str] = frozenset()
    """Options whose value is the next word."""
    folder: frozenset[str] = frozenset()
    """Those that change the folder in which the program runs."""
    subcommand: str = ""
    positional: int = 0
    """Arguments before the program."""


def _wrapper(valued: str = "", folder: str = "", subcommand: str = "", positional: int = 0) -> _Wrapper:
    folders = frozenset(folder.split())
    return _Wrapper(frozenset(valued.split()) | folders, folders, subcommand, positional)


_CONDA = _wrapper("-n --name -p --prefix -e --env -a --attach -r --root-prefix", "--cwd", "run")
WRAPPERS = {
    "chrt": _wrapper("-T -P -D", positional=1),
    "conda": _CONDA,
    "env": _wrapper("-u --unset -S --split-string", "-C --chdir"),
    "hatch": _wrapper("-e --env -p --project --data-dir --cache-dir --config", subcommand="run"),
    "ionice": _wrapper("-c --class -n --classdata"),
    "mamba": _CONDA,
    "micromamba": _CONDA,
    "ncu": _wrapper("-o --export -k --kernel-name -c --launch-count -s --launch-skip --set --section --metrics"),
    "nice": _wrapper("-n --adjustment"),
    "nohup": _wrapper(),
    "nsys": _wrapper("-o -t -w -s -c -f -y -d -x -n -e -b -g --output --trace", subcommand="profile"),
    "numactl": _wrapper(
        "-i --interleave -p --preferred -C --physcpubind -N --cpunodebind -m --membind -w --weighted-interleave"
    ),
    "pdm": _wrapper("-c --config --venv", "-p --project", "run"),
    "pipenv": _wrapper(subcommand="run"),
    "pixi": _wrapper("-e --environment --color --platform", "--manifest-path -m", "run"),
    "poetry": _wrapper("-P --project", "-C --directory", "run"),
    "rye": _wrapper("--pyproject", subcommand="run"),
    "setsid": _wrapper(),
    "stdbuf": _wrapper("-i --input -o --output -e --error"),
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
}  # fmt: skip


@dataclass(frozen=True)
class InnerProgram:
    """The program behind the wrappers of a command."""

    index: int
    """Of its first word; 0: the command starts with it. ``uv run -m MODULE`` starts with ``-m``."""
    changes_folder: bool = False
    """Whether it runs in another folder."""


def find_program(command: Sequence[str], is_launcher: Callable[[Sequence[str]], bool] | None = None) -> InnerProgram:
    """Return where the program of ``command`` starts.

    Args:
        is_launcher: whether words start with a launcher. An option that is not known may have a value; it has one if a
            launcher follows the next word.
    """
    index, changes_folder = 0, False
    while (wrapper := WRAPPERS.get(PurePath(command[index]).name)) is not None:
        start = _skip_options(wrapper, command, index + 1, is_launcher)
        options = command[index + 1 : start]
        changes_folder |= any(option.partition("=")[0] in wrapper.folder for option in options)
        if wrapper.subcommand and wrapper.subcommand not in options:
            break  # `uv sync`
        if start >= len(command):
            break
        index = start
    return InnerProgram(index, changes_folder)


def _skip_options(
    wrapper: _Wrapper, command: Sequence[str], index: int, is_launcher: Callable[[Sequence[str]], bool] | None
) -> int:
    """Return the index after the options, the subcommand and the arguments that stand before the program."""
    needs_subcommand, positional = bool(wrapper.subcommand), wrapper.positional
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
            if word != wrapper.subcommand:
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


def find_hidden_commands(command: Sequence[str], is_program: Callable[[str], bool]) -> list[list[str]]:
    """Return the commands that a shell or a container runtime at the start of ``command`` would execute.

    Args:
        is_program: whether a word names a program such as Python or a launcher. The first one after the image of a
            container is taken for what runs in it.
    """
    name = PurePath(command[0]).name
    if name in CONTAINER_RUNTIMES:
        for index in range(2, len(command)):
            # A word after an option may be its value; the image stands between the options and the program.
            if is_program(command[index]) and (command[index - 1] == "--" or not command[index - 1].startswith("-")):
                return [list(command[index:])]
        return []
    if name not in proc.SHELLS:
        return []
    flag = next((i for i, word in enumerate(command[1:], start=1) if not word.startswith("-")), len(command))
    has_script = any(re.fullmatch(r"-[a-z]*c", word) for word in command[1:flag])
    return list(_split_script(command[flag])) if has_script and flag < len(command) else []


def _split_script(text: str) -> Iterator[list[str]]:
    """Iterate over the simple commands of a shell script, without assignments and keywords before them."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        words = list(lexer)
    except ValueError:  # a quote is not closed: the shell will refuse it
        return
    current: list[str] = []
    for word in [*words, ";"]:
        if word and not word.strip(_OPERATORS):
            if current:
                yield current
            current = []
        elif current or not (word in _KEYWORDS or _ASSIGNMENT.fullmatch(word)):
            current.append(word)
