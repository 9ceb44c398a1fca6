"""``clustertrain adopt``: a batch script as a cluster profile and a submit line."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import json_option, print_json
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clustertrain.report.documents import submissions as documents
    from clustertrain.submit.adopt.adoption import Adoption
    from clustertrain.submit.adopt.outcomes import Outcome

_TEXT_WIDTH = 50
_MIN_TEXT_WIDTH, _MIN_DETAIL_WIDTH = 16, 24
_INDENT = " " * 7  # the column of the line number
_NO_TERMINAL = (1000, 24)  # a file has one line for each
_HEADINGS = {
    "submit": "submit line",
    "profile": "profile",
    "replaced": "clustertrain does it",
    "dropped": "left out",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("script", metavar="SCRIPT")
@click.option("--write", "name", metavar="NAME", help="Store the cluster profile as NAME.")
@click.option("--force", is_flag=True, help="With --write: replace a profile of that name.")
@json_option
def adopt(script: str, name: str | None, force: bool, as_json: bool) -> None:
    """Read the batch script SCRIPT and print the cluster profile and the submit line that do the same.

    Nothing of the script is executed. The output lists what becomes of each line, and what you have to decide.
    """
    from clustertrain.cluster import profile_file
    from clustertrain.submit.adopt.adoption import adopt as adopt_script
    from clustertrain.submit.adopt.script_file import read_script

    if force and name is None:
        raise UsageError("--force: no effect without --write", fix="add --write NAME")
    profile_name = profile_file.check_name(name if name is not None else _default_name(script))
    adoption = adopt_script(read_script(Path(script), script), script, profile_name, Path.cwd())
    path = _store(adoption, force) if name is not None and adoption.profile else None
    if as_json:
        if name is not None and not adoption.profile:
            click.echo(_describe_no_profile(name), err=True)
        print_json("adopt", _build_document(adoption, path))
    else:
        _print(adoption, path, name)


def _default_name(script: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("-._") or "adopted"


def _store(adoption: Adoption, force: bool) -> Path:
    """Write the profile.

    Raises:
        UsageError: a profile of that name has another content, and ``force`` is not given.
    """
    from clustertrain import settings
    from clustertrain.cluster import profile_file
    from clustertrain.config import cluster
    from clustertrain.config.parsing.documents import read_text

    existing = cluster.list_profiles().get(adoption.profile_name)
    path = existing or settings.profile_folders()[-1] / f"{adoption.profile_name}.toml"
    if existing is not None and not force and read_text(existing) != adoption.profile_text:
        raise UsageError(
            f"cluster profile {adoption.profile_name} exists: {existing}",
            fix="choose another name, or add --force to replace it",
        )
    profile_file.write(path, adoption.profile_text)
    return path


def _build_document(adoption: Adoption, path: Path | None) -> documents.Adoption:
    from clustertrain.report.documents import submissions as documents

    return documents.Adoption(
        script=adoption.script,
        lines=tuple(outcome for outcome in adoption.outcomes if outcome.outcome != "decide"),
        decide=tuple(documents.Question(line=q.line, text=q.text, detail=q.detail) for q in adoption.questions),
        name=adoption.profile_name,
        profile=adoption.profile,
        profile_text=adoption.profile_text,
        path=str(path) if path else None,
        submit=adoption.submit,
        argv=adoption.argv,
    )


def _describe_no_profile(name: str | None) -> str:
    """Return the line for a script that needs no profile; ``name`` is the value of ``--write``."""
    return f"No cluster profile is needed{'' if name is None else f': {name} is not stored'}."


def _print(adoption: Adoption, path: Path | None, name: str | None) -> None:
    columns = shutil.get_terminal_size(_NO_TERMINAL).columns
    click.echo(f"{adoption.script}: what becomes of each line\n")
    _print_lines([outcome for outcome in adoption.outcomes if outcome.outcome != "decide"], columns)
    if adoption.questions:
        click.echo("\nTo decide:")
        for question in adoption.questions:
            text = f"{_cut(question.text, _TEXT_WIDTH)}: {question.detail}"
            lines = _wrap(text, columns - len(_INDENT))
            click.echo(f"{question.line or '':>5}  {lines[0]}")
            for line in lines[1:]:
                click.echo(f"{_INDENT}{line}")
    if not adoption.profile:
        click.echo(f"\n{_describe_no_profile(name)}")
    elif path is not None:
        click.echo(f"\n{path}: written")
    else:
        click.echo(f"\nCluster profile; `--write {adoption.profile_name}` stores it:\n")
        click.echo(adoption.profile_text, nl=False)
    click.echo(f"\nSubmit:\n\n{adoption.submit}")


def _print_lines(outcomes: Sequence[Outcome], columns: int) -> None:
    """Print a table that is at most ``columns`` wide: line, text, what becomes of it."""
    available = columns - len(_INDENT) - 2
    widest = max((len(outcome.text) for outcome in outcomes), default=0)
    width = max(_MIN_TEXT_WIDTH, min(_TEXT_WIDTH, widest, available * 2 // 5))
    for outcome in outcomes:
        lines = _wrap(f"{_HEADINGS[outcome.outcome]}: {outcome.detail}", available - width)
        click.echo(f"{outcome.line or '':>5}  {_cut(outcome.text, width):<{width}}  {lines[0]}")
        for line in lines[1:]:
            click.echo(f"{_INDENT}{'':<{width}}  {line}")


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(_MIN_DETAIL_WIDTH, width), break_on_hyphens=False) or [""]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
