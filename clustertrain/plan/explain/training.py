"""What is trained, and how, in a line each. Formulas and classes are the trainer's; nothing is decided here."""

from __future__ import annotations

from pathlib import Path

from clustertrain.config.data import DataSpec
from clustertrain.config.job import RunSpec
from clustertrain.config.objective import ObjectiveSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.recipe import Recipe
from clustertrain.plan import lr_schedule
from clustertrain.plan.cost import optimizer_state
from clustertrain.plan.cost.optimizer_state import State
from clustertrain.plan.layout import Layout, counted


def words(spec: RunSpec, layout: Layout, state: State | None) -> dict[str, str]:
    """By what each line is about. ``state``: of the optimizer, where the shapes of the model are known."""
    recipe = spec.recipe
    if spec.script is not None:
        own = "model, data, batch, objective, optimizer, schedule, clipping and evaluation"
        return {"script": f"{Path(spec.script.path).name} has its own {own}"}
    model = recipe.model
    return {
        "model": f"made by {model.entry}" if model.entry else f"{model.kind}, {model.parameters():,} parameters",
        **({"data": _packed(recipe.data)} if recipe.data.pack else {}),
        "objective": _objective(recipe),
        "optimizer": optimizer_state.words(recipe.optim, layout, state, text=recipe.is_text),
        "schedule": _schedule(recipe),
        "clipping": _clipping(recipe.optim),
        "evaluation": _evaluation(recipe),
    }


def _packed(data: DataSpec) -> str:
    """How much stays empty follows from the lengths of all documents, which are not read here."""
    return (
        f"whole documents, packed into samples of {counted(data.seq_len, 'token')}; `clustertrain diagnose data` tells "
        "how much of them is padding"
    )


def _objective(recipe: Recipe) -> str:
    spec, kind = recipe.objective, recipe.objective_kind
    said = {
        "cross-entropy": _cross_entropy(spec),
        "huber": f"huber, linear from {spec.delta:g} on",
        "nt-xent": f"nt-xent at temperature {spec.temperature:g}, of a micro-batch",
    }.get(kind, kind)
    if recipe.model.kind == "two-tower":
        return f"nt-xent, each sample told from the others of its group of {recipe.model.two_tower.group}"
    own = recipe.model.entry and spec.kind == "auto"
    return f"the model's own loss where it has one, else {said}" if own else said


def _cross_entropy(spec: ObjectiveSpec) -> str:
    parts = ["cross-entropy"]
    parts += [f"label smoothing {spec.label_smoothing:g}"] if spec.label_smoothing else []
    if spec.ignore_index != ObjectiveSpec().ignore_index:
        parts.append(f"targets of {spec.ignore_index} count nothing")
    return ", ".join(parts)


def _schedule(recipe: Recipe) -> str:
    """With the rates that the trainer sets: the first ones, the peak, the last one."""
    spec, total, peak = recipe.schedule, recipe.train.steps, recipe.optim.lr
    end = f"{lr_schedule.rate(spec, total, total, peak=peak):.4g}"
    warmup = spec.warmup(total)
    start = f"up to {peak:g} in {warmup} steps" if warmup > 1 else f"{peak:g} from the first step"
    then = {
        "cosine": f"{start}, then down to {end}",
        "linear": f"{start}, then down to {end}",
        "constant": start,
        "wsd": f"{start}, constant, and down to {end} in the last {spec.cooldown(total)}",
        "step": f"{start}, times {spec.gamma:g} after {_listed(lr_schedule.milestones(spec, total))}, {end} at the end",
        "plateau": f"{start}, times {spec.factor:g} after more than {counted(spec.patience, 'evaluation')} without "
        f"a better {recipe.deciding_metric}, not below {peak * spec.floor:.4g}",
        "one-cycle": f"from {lr_schedule.rate(spec, 1, total, peak=peak):.4g} up to {peak:g} at "
        f"{lr_schedule.top_step(spec, total)}, down to {end}",
    }[spec.kind]
    return f"{spec.kind} over {counted(total, 'step')}: {then}"


def _listed(steps: tuple[int, ...]) -> str:
    return ", ".join(map(str, steps[:-1])) + " and " * (len(steps) > 1) + str(steps[-1])


def _clipping(spec: OptimSpec) -> str:
    if spec.clip == "value":
        return f"each element of the gradient between -{spec.clip_value:g} and {spec.clip_value:g}"
    if spec.clip == "adaptive":
        first = f"{spec.clip_norm:g}" if spec.clip_norm else "without a limit"
        return f"global gradient norm at most the {spec.clip_quantile:g} quantile of the last ones, at first {first}"
    return f"global gradient norm at most {spec.clip_norm:g}" if spec.clip_norm else "none"


def _evaluation(recipe: Recipe) -> str:
    data, asked, steps = recipe.data, recipe.evaluation, recipe.train.steps
    better = "higher" if recipe.higher_is_better else "lower"
    decides = f"{recipe.deciding_metric} decides, {better} is better"
    if not data.validates:
        return f"none, as data.validation is not set; {decides}"
    often = f"every {recipe.evaluate_every} steps and at the end" if recipe.evaluate_every < steps else "at the end"
    source = data.validation_path or f"{100 * data.validation:g}% of the data, kept apart"
    most = f" (at most {counted(asked.samples, 'sample')})" if asked.samples else ""
    parts = [f"{often}, on {source}{most}: {', '.join(_measured(recipe))}", decides]
    if recipe.contract.slices:
        parts.append(f"slices {', '.join(recipe.contract.slices)} are told apart")
    if asked.patience:
        parts.append(f"the run ends after {counted(asked.patience, 'evaluation')} without a better one")
    return "; ".join(parts)


def _measured(recipe: Recipe) -> list[str]:
    """What a loss of the model's own is computed from is not known, and then only what is named is measured."""
    own = recipe.model.entry and recipe.objective.kind == "auto"
    return ["loss", *(recipe.evaluation.metrics if own else recipe.evaluated_metrics)]
