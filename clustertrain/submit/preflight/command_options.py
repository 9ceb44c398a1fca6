"""Checks of the options for commands, and of those that commands do not have."""

from __future__ import annotations

from clustertrain.config.command_options import (
    CHECKPOINT,
    PLACEHOLDERS,
    find_unknown_placeholders,
    split_arguments,
    uses_placeholder,
)
from clustertrain.config.job import JobSpec, ScriptSpec
from clustertrain.errors import UsageError
from clustertrain.submit.option_names import option_name
from clustertrain.submit.prepared_run import ResolvedRun

_LAYOUT_KEYS = ("layout", "tp", "cp", "pp", "dp_replicate", "dp_shard")
_COMMAND_KEYS = ("hooks", "stop_signal", "resume_args", "checkpoints")


def check_command_layout(run: ResolvedRun) -> None:
    """Refuse options for the layout and --profile with a command or a script without a session: they are its own."""
    script = run.spec.script
    if script is None or not script.command:
        return
    if given := [option_name(key) for key in _LAYOUT_KEYS if key in run.parsed.request.job]:
        raise UsageError(
            f"{', '.join(given)}: no effect on {script.name}, which decides its own layout",
            fix=f"pass the program its own options for it{_session_hint(run, script)}",
        )
    if run.parsed.values.train.profile:
        raise UsageError(
            f"--profile: no effect on {script.name}, which has its own steps",
            fix=f"profile them in the program, for example with torch.profiler{_session_hint(run, script)}",
        )


def _session_hint(run: ResolvedRun, script: ScriptSpec) -> str:
    if not run.parsed.request.target:
        return ""
    return f"; if a module of it opens a session, import clustertrain in {script.name} too"


def check_command_options(run: ResolvedRun) -> list[str]:
    """Refuse options for commands with a recipe or a session; note --resume-args that may not do what they should."""
    script, job = run.spec.script, run.spec.job
    if script is not None and script.command:
        if not run.parsed.request.job.get("checkpoints", "*").strip():
            raise UsageError(
                "--checkpoints: the pattern is empty", fix="name one, such as 'out/*.pt', or leave the option out"
            )
        return _note_resume_args(job, script)
    given = {*run.parsed.request.job, *run.parsed.document.get("job", {})}
    if unused := [option_name(key) for key in _COMMAND_KEYS if key in given]:
        subject = "a recipe" if script is None else f"{script.name}, which uses clustertrain"
        raise UsageError(
            f"{', '.join(unused)}: no effect on {subject}",
            fix="leave it out; it is for programs that stop and resume by themselves: submit [OPTIONS] -- COMMAND",
        )
    return []


def _note_resume_args(job: JobSpec, script: ScriptSpec) -> list[str]:
    arguments = split_arguments(job.resume_args)
    notes = []
    if unknown := find_unknown_placeholders(arguments):
        names, verb = ", ".join(f"{{{name}}}" for name in unknown), "is" if len(unknown) == 1 else "are"
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        notes.append(
            f"--resume-args: {names} {verb} passed as {'it is' if verb == 'is' else 'they are'}; known: {known}"
        )
    if arguments and not job.checkpoints and not uses_placeholder(arguments, CHECKPOINT):
        notes.append(
            f"--resume-args: added from the second attempt on, whether or not {script.name} has saved by then; "
            "--checkpoints PATTERN adds them only if it has"
        )
    return notes
