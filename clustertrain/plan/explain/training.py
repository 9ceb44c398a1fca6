"""One-line descriptions of the training: model, objective, optimizer, schedule, clipping, evaluation; of a command."""

from __future__ import annotations

import shlex

from clustertrain.config.checks.epochs import describe_epochs, has_epoch_keys
from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.objective import ObjectiveSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.recipe import Recipe
from clustertrain.plan import lr_schedule, non_decoder
from clustertrain.plan.attention import AttentionChoice, choose_document_kernel
from clustertrain.plan.cost.memory import GIB
from clustertrain.plan.cost.optimizer_state import OptimizerStateSize
from clustertrain.plan.explain.adapter import describe_adapter, describe_weights
from clustertrain.plan.explain.optimizer import describe_optimizer
from clustertrain.plan.layout import Batch, Layout, format_gib, pluralize
from clustertrain.printable import printable

MAX_COMMAND_CHARS = 100


def describe_training(
    spec: RunSpec, layout: Layout, batch: Batch, state: OptimizerStateSize | None, device: str
) -> dict[str, str]:
    """Return the descriptions by subject.

    Args:
        batch: split of the global batch; unused for a script.
        state: size of the optimizer state; None if the shapes of the model are unknown.
    """
    recipe = spec.recipe
    if spec.script is not None and spec.script.command:
        return _describe_command(spec.job, spec.script)
    if spec.script is not None:
        parts = "model, data, batch, objective, optimizer, schedule, clipping and evaluation"
        return {"script": f"{spec.script.name} defines {parts} itself"}
    model = recipe.model
    return {
        "model": f"built by {model.entry}" if model.entry else f"{model.kind}, {model.parameters():,} parameters",
        **({"weights": describe_weights(model, spec.job.nodes)} if model.init else {}),
        **({"adapter": describe_adapter(recipe.adapter, model)} if recipe.adapter.is_enabled else {}),
        **({"data": _describe_samples(recipe)} if recipe.data.pack or recipe.data_kind == "chat" else {}),
        **_describe_attention(recipe, layout, device),
        "objective": _describe_objective(recipe, batch, layout),
        "optimizer": describe_optimizer(
            recipe.optim, layout, state, text=recipe.is_text, adapted=recipe.adapter.is_enabled
        ),
        **({"epochs": describe_epochs(recipe, batch.global_batch)} if has_epoch_keys(recipe) else {}),
        "schedule": _describe_schedule(recipe),
        "clipping": _describe_clipping(recipe.optim),
        "evaluation": _describe_evaluation(recipe),
    }


def _describe_command(job: JobSpec, script: ScriptSpec) -> dict[str, str]:
    ranks = job.nodes * job.gpus
    who = f"each of {ranks} ranks runs" if ranks > 1 else "one rank runs"
    signal, _, to_all = job.stop_signal.partition(":")
    descriptions = {"command": f"{who} {_shorten(shlex.join(script.command))}"}
    if job.stop_signal != JobSpec().stop_signal:
        descriptions["stop signal"] = f"{signal}, to every process of a rank" if to_all else signal
    if job.resume_args:
        descriptions["resume arguments"] = _shorten(job.resume_args)
    if job.checkpoints:
        descriptions["checkpoints"] = job.checkpoints
    if job.container:
        runtime = "" if job.container_runtime == "auto" else f" with {job.container_runtime}"
        mounts = f"; mounts {', '.join(job.container_mounts)}" if job.container_mounts else ""
        descriptions["container"] = f"{job.container}{runtime}{mounts}"
    return descriptions


def _shorten(text: str) -> str:
    """Return ``text`` as one line of limited length."""
    line = printable(" ".join(text.split("\n")))
    return line if len(line) <= MAX_COMMAND_CHARS else f"{line[: MAX_COMMAND_CHARS - 2]} …"


def _describe_samples(recipe: Recipe) -> str:
    # The share of padding depends on the lengths of all documents, which are not read here.
    if recipe.objective_kind == "dpo":
        size = pluralize(recipe.data.seq_len, "token")
        return f"pairs of a chosen and a rejected answer, two sequences of {size} per sample"
    is_chat, size = recipe.data_kind == "chat", pluralize(recipe.data.seq_len, "token")
    place = f"packed into samples of {size}" if recipe.data.pack else f"one per sample of {size}"
    return (
        f"{'conversations' if is_chat else 'whole documents'}, {place}"
        f"{', of which the answers are learned' if is_chat else ''}; `clustertrain diagnose data` reports the share of "
        "padding"
    )


def _describe_attention(recipe: Recipe, layout: Layout, device: str) -> dict[str, str]:
    choice = AttentionChoice.of(recipe)
    parts = [f"only torch's {choice.backend} kernel"] if choice.backend != "auto" else []
    if choice.in_documents:
        kernel = choose_document_kernel(choice, layout, device)
        # How long the documents are is not read here.
        parts += [f"within each document, by {kernel.describe()}", "predicted times are those of whole samples"]
    return {"attention": "; ".join(parts)} if parts else {}


def _describe_objective(recipe: Recipe, batch: Batch, layout: Layout) -> str:
    spec, kind = recipe.objective, recipe.objective_kind
    description = {
        "cross-entropy": _describe_cross_entropy(spec),
        "huber": f"huber, linear from {spec.delta:g} on",
        "dpo": f"dpo with beta {spec.beta:g}; before the first step, a forward pass over all pairs computes the "
        "reference, in about a third of the time of an epoch",
        "nt-xent": _describe_contrastive(recipe, batch, layout),
    }.get(kind, kind)
    has_own_loss = recipe.model.entry and spec.kind == "auto"
    return f"the model's loss if it computes one, otherwise {description}" if has_own_loss else description


def _describe_contrastive(recipe: Recipe, batch: Batch, layout: Layout) -> str:
    """Describe what is compared, and what this costs each rank in a step."""
    spec, model = recipe.objective, recipe.model
    name = "nt-xent" if model.kind == "two-tower" else f"nt-xent at temperature {spec.temperature:g}"
    if spec.group:
        return f"{name}, each sample against the others of its group of {spec.group}"
    rows, columns = batch.global_batch // layout.data_parallel, batch.global_batch
    parts = [f"{name}, each sample against the others of the global batch of {columns:,}"]
    similarities = non_decoder.similarities_bytes(model, rows, columns)
    parts.append(f"a rank holds {format_gib(similarities / GIB)} of similarities")
    if layout.data_parallel > 1:
        gathered = non_decoder.embeddings_bytes(model, columns)
        size = f"{format_gib(gathered / GIB)} of " if gathered else ""
        parts.append(f"gathers {size}embeddings and reduces their gradient in each step")
    if batch.grad_accum > 1:
        parts.append(f"the {batch.grad_accum} micro-batches run forward twice")
    return "; ".join(parts)


def _describe_cross_entropy(spec: ObjectiveSpec) -> str:
    parts = ["cross-entropy"]
    parts += [f"label smoothing {spec.label_smoothing:g}"] if spec.label_smoothing else []
    if spec.ignore_index != ObjectiveSpec().ignore_index:
        parts.append(f"targets of {spec.ignore_index} are ignored")
    return ", ".join(parts)


def _describe_schedule(recipe: Recipe) -> str:
    """Describe the schedule with its first rates, its peak and its last rate."""
    spec, total, peak = recipe.schedule, recipe.train.steps, recipe.optim.lr
    end = f"{lr_schedule.lr_at_step(spec, total, total, peak=peak):.4g}"
    warmup = spec.resolve_warmup_steps(total)
    start = f"up to {peak:g} in {warmup} steps" if warmup > 1 else f"{peak:g} from the first step"
    momentum = (
        f"; momentum from {spec.max_momentum:g} down to {spec.min_momentum:g}, and back"
        if recipe.cycles_momentum
        else ""
    )
    description = {
        "cosine": f"{start}, then down to {end}",
        "linear": f"{start}, then down to {end}",
        "constant": start,
        "wsd": f"{start}, constant, and down to {end} in the last {spec.resolve_cooldown_steps(total)}",
        "step": (
            f"{start}, times {spec.gamma:g} after {_join_steps(lr_schedule.resolve_milestones(spec, total))}, {end} at"
            " the end"
        ),
        "plateau": (
            f"{start}, times {spec.factor:g} after more than {pluralize(spec.patience, 'evaluation')} without "
            f"a better {recipe.deciding_metric}, not below {peak * spec.floor:.4g}"
        ),
        "one-cycle": (
            f"from {lr_schedule.lr_at_step(spec, 1, total, peak=peak):.4g} up to {peak:g} at "
            f"{lr_schedule.peak_step(spec, total)}, down to {end}{momentum}"
        ),
    }[spec.kind]
    return f"{spec.kind} over {total:,} step{'s' * (total != 1)}: {description}"


def _join_steps(steps: tuple[int, ...]) -> str:
    return ", ".join(map(str, steps[:-1])) + " and " * (len(steps) > 1) + str(steps[-1])


def _describe_clipping(spec: OptimSpec) -> str:
    if spec.clip == "value":
        return f"each element of the gradient between -{spec.clip_value:g} and {spec.clip_value:g}"
    if spec.clip == "adaptive":
        initial = f"{spec.clip_norm:g}" if spec.clip_norm else "without a limit"
        return f"global gradient norm at most the {spec.clip_quantile:g} quantile of recent norms, initially {initial}"
    return f"global gradient norm at most {spec.clip_norm:g}" if spec.clip_norm else "none"


def _describe_evaluation(recipe: Recipe) -> str:
    data, evaluation, steps = recipe.data, recipe.evaluation, recipe.train.steps
    better = "higher" if recipe.higher_is_better else "lower"
    criterion = f"{recipe.deciding_metric} decides, {better} is better"
    if not data.has_validation:
        return f"none, because data.validation is not set; {criterion}"
    interval = (
        f"every {recipe.evaluation_interval} steps and at the end"
        if recipe.evaluation_interval < steps
        else "at the end"
    )
    source = data.validation_path or f"{100 * data.validation:g}% of the data, held out"
    limit = f" (at most {pluralize(evaluation.samples, 'sample')})" if evaluation.samples else ""
    parts = [f"{interval}, on {source}{limit}: {', '.join(_list_metrics(recipe))}", criterion]
    if recipe.contract.slices:
        parts.append(f"slices {', '.join(recipe.contract.slices)} are reported")
    if evaluation.patience:
        parts.append(f"the run ends after {pluralize(evaluation.patience, 'evaluation')} without a better one")
    return "; ".join(parts)


def _list_metrics(recipe: Recipe) -> list[str]:
    # The inputs of a loss that the model computes are unknown, so only the listed metrics are measured.
    has_own_loss = recipe.model.entry and recipe.objective.kind == "auto"
    return ["loss", *(recipe.evaluation.metrics if has_own_loss else recipe.evaluated_metrics)]
