"""The phases up to the plan: parse, resolve, count, plan, with the checks of each (``checks.py``) after it."""

from __future__ import annotations

import dataclasses

from clustertrain.plan.decide import split_model
from clustertrain.plan.planner import plan
from clustertrain.plan.request import PlanRequest
from clustertrain.scheduler import registry
from clustertrain.scheduler.backend import Backend
from clustertrain.submit import checks
from clustertrain.submit.launchers.replace import replace_launcher
from clustertrain.submit.preflight import data_size, model_stats
from clustertrain.submit.preflight.model_stats import ModelCountError, ModelStats
from clustertrain.submit.prepared_run import PreparedRun, ResolvedRun
from clustertrain.submit.recipe import parse_recipe
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.resolve import resolve_run


def prepare(
    request: SubmitRequest, existing_backend: Backend | None = None, purpose: registry.Purpose = "submit"
) -> PreparedRun:
    """Parse, check and plan ``request``; create nothing. Call ``checks.check_plan`` to check the plan.

    Args:
        existing_backend: the backend that was selected earlier for the same request; it is not selected again.

    Raises:
        UsageError, ConfigError, UnsuitableEnvironment: the request is refused; ``checks.py`` lists the reasons.
    """
    checks.run_checks(checks.REQUEST_CHECKS, request)
    translation = replace_launcher(request)
    parsed = parse_recipe(translation.request)
    notes = [*translation.notes, *checks.run_checks(checks.RECIPE_CHECKS, parsed)]
    run = data_size.resolve_epochs(resolve_run(parsed, existing_backend, purpose))
    notes += [*([run.python.note] if run.python.note else []), *checks.run_checks(checks.RUN_CHECKS, run)]
    stats = None
    if _must_count(run):
        try:
            stats = _count_model(run)
        except ModelCountError as e:
            notes.append(f"the model could not be counted here: {e.message}")
    run_plan = plan(
        run.spec,
        run.profile,
        run.spec.job.device,
        inherited_env=request.environ.keys(),
        model_stats=stats,
        notes=notes,
    )
    return PreparedRun(**{f.name: getattr(run, f.name) for f in dataclasses.fields(run)}, plan=run_plan)


def _must_count(run: ResolvedRun) -> bool:
    mode = run.parsed.request.count_mode
    return mode == "trace" or (mode == "yes" and run.spec.script is None and bool(run.spec.recipe.model.entry))


def _count_model(run: ResolvedRun) -> ModelStats:
    request, ranks = run.parsed.request, run.python.ranks
    if run.spec.job.container:
        raise ModelCountError("it is counted with the ranks' Python, which is in the image")
    if (problem := ranks.find_trainer_problem()) and not run.profile.setup:
        raise ModelCountError(f"{problem.message} ({problem.fix})")
    split = split_model(PlanRequest(run.spec, run.spec.job.device, run.profile))
    return model_stats.count_model(
        run.spec, split, ranks.path, run.code, request.environ, trace=request.count_mode == "trace"
    )
