"""Keys of a recipe that a run does not read because of its kind of model, schedule and so on.

A key that is set but unused is refused or reported, since its author expected an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from clustertrain.config.checks import epochs
from clustertrain.config.checks.script_keys import is_trainer_key
from clustertrain.config.data import DIGITS
from clustertrain.config.job import RunSpec
from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.config.parsing.documents import format_value
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError


@dataclass(frozen=True)
class KeyCondition:
    """A condition under which a key is read."""

    is_used: Callable[[Recipe], bool]
    describe_current: Callable[[Recipe], str]
    """Return the setting of a recipe that contradicts the condition."""
    fix: str
    """Alternative to removing the key."""


def is_key_used(spec: RunSpec, key: str) -> bool:
    """Return whether a run reads ``key`` of its recipe, for example ``optim.lr``."""
    return unused_reason(spec.recipe, key) is None if spec.script is None else not is_trainer_key(key)


def unused_reason(recipe: Recipe, key: str) -> KeyCondition | None:
    """Return the condition that makes ``key`` unused in ``recipe``; None if the key is used."""
    return next(
        (
            condition
            for name, condition in _CONDITIONS
            if f"{key}.".startswith(f"{name}.") and not condition.is_used(recipe)
        ),
        None,
    )


def find_unused_keys(document: Mapping[str, Any], recipe: Recipe) -> dict[str, KeyCondition]:
    """Return the unused keys of ``document``, from which ``recipe`` was built, with the unmet conditions.

    Keys whose value changes nothing are not included.
    """
    reasons = {key: unused_reason(recipe, key) for key, value in iter_keys(document) if not _is_noop_value(key, value)}
    return {key: condition for key, condition in reasons.items() if condition is not None}


def check_unused_keys(unused: Mapping[str, KeyCondition], recipe: Recipe, source: str) -> None:
    """Raise ConfigError for the first unused key and the others unused for the same reason."""
    for message, keys, fix in _format_by_reason(unused, recipe):
        raise ConfigError(f"{source}: {message}", fix=f"remove {'it' if len(keys) == 1 else 'them'}, or {fix}")


def format_notes(unused: Mapping[str, KeyCondition], recipe: Recipe) -> list[str]:
    """Return one sentence per reason."""
    return [message for message, _, _ in _format_by_reason(unused, recipe)]


def _format_by_reason(unused: Mapping[str, KeyCondition], recipe: Recipe) -> Iterator[tuple[str, list[str], str]]:
    """Yield (message, keys, alternative to removing them) per reason."""
    keys_by_reason: dict[tuple[str, str], list[str]] = {}
    for key, condition in unused.items():
        keys_by_reason.setdefault((condition.describe_current(recipe), condition.fix), []).append(key)
    for (current, fix), keys in keys_by_reason.items():
        yield f"{' and '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect with {current}", keys, fix


def iter_keys(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of ``document`` and their values."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from iter_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# Keys, besides the limits of alerts, that 0 turns off and whose default is not 0.
_ZERO_DISABLES = (
    "optim.clip_norm",
    "optim.momentum",
    "schedule.warmup_steps",
    "schedule.warmup_ratio",
    "schedule.warmup_epochs",
    "schedule.cooldown_steps",
    "evaluation.warn_when_rising",
)


def _is_noop_value(key: str, value: Any) -> bool:
    """Return whether ``value`` changes nothing, because it is the default or turns a feature off."""
    if value is False or (value == 0 and (key in _ZERO_DISABLES or key.startswith("telemetry.alerts."))):
        return True
    default: Any = msgspec.to_builtins(Recipe())
    for part in key.split("."):
        default = default.get(part) if isinstance(default, Mapping) else None
    return bool(value == (list(default) if isinstance(default, tuple) else default))


def _when_value(key: str, get_value: Callable[[Recipe], str], *values: str) -> KeyCondition:
    """Return the condition that ``key`` has one of ``values``. ``get_value`` returns its value with "auto" resolved."""
    return KeyCondition(
        lambda recipe: get_value(recipe) in values,
        lambda recipe: f"{key} = {format_value(get_value(recipe))}",
        f"set {key} = {' or '.join(map(format_value, values))}",
    )


def _when_schedule(*kinds: str) -> KeyCondition:
    return _when_value("schedule.kind", lambda recipe: recipe.schedule.kind, *kinds)


def _when_optimizer(*names: str) -> KeyCondition:
    return _when_value("optim.name", lambda recipe: recipe.optim.name, *names)


def _when_clip(*methods: str) -> KeyCondition:
    return _when_value("optim.clip", lambda recipe: recipe.optim.clip, *methods)


def _when_objective(*kinds: str) -> KeyCondition:
    return _when_value("objective.kind", lambda recipe: recipe.objective_kind, *kinds)


def _when_model(*kinds: str) -> KeyCondition:
    return _when_value("model.kind", lambda recipe: recipe.model.kind, *kinds)


def _when_data(*kinds: str) -> KeyCondition:
    return _when_value("data.kind", lambda recipe: recipe.data_kind, *kinds)


def _when_tracking(*trackers: str) -> KeyCondition:
    return KeyCondition(
        lambda recipe: any(name in recipe.tracking.trackers for name in trackers),
        lambda recipe: f"tracking.trackers = {format_value(recipe.tracking.trackers)}",
        f"set tracking.trackers = {' or '.join(format_value([name]) for name in trackers)}",
    )


def _has_fixed_size(recipe: Recipe) -> bool:
    """Return whether no key can change the size of the data of ``recipe``."""
    data, kind = recipe.data, recipe.data_kind
    return all(
        (kind in ("images", "pairs") and path == DIGITS) or (kind == "images" and path.endswith(".npz"))
        for path in (data.path, data.validation_path or data.path)
    )


_OWN_MODEL = KeyCondition(
    lambda recipe: not recipe.model.entry,
    lambda recipe: f"model.entry = {format_value(recipe.model.entry)}",
    "pass it in model.args, the arguments of the entry",
)
_SEQUENCE_DATA = KeyCondition(
    lambda recipe: recipe.is_text or recipe.model.is_decoder,
    lambda recipe: f"data.kind = {format_value(recipe.data_kind)}",
    'set data.kind = "text", "tokens", "chat" or "pairs"',
)
_PACKED = KeyCondition(
    lambda recipe: recipe.data.pack or recipe.data_kind == "custom",
    lambda recipe: "data.pack = false",
    "set data.pack = true",
)
_TOKENIZER = KeyCondition(
    lambda recipe: recipe.data_kind == "chat",
    lambda recipe: f"data.kind = {format_value(recipe.data_kind)}",
    'set data.kind = "chat"; text is tokenized once, with `clustertrain data tokenize --tokenizer`',
)
_TEMPERATURE = KeyCondition(
    lambda recipe: recipe.model.kind != "two-tower",
    lambda recipe: 'model.kind = "two-tower"',
    "set model.two_tower.temperature",
)
_VALIDATION = KeyCondition(
    lambda recipe: recipe.data.has_validation,
    lambda recipe: "no validation data",
    "set data.validation or data.validation_path",
)
_BUDGET = KeyCondition(
    lambda recipe: recipe.contract.has_budget,
    lambda recipe: "no budget",
    "set contract.gpu_hours, contract.wall_hours or contract.cost",
)
_ROLL_BACK = KeyCondition(
    lambda recipe: recipe.stability.can_roll_back,
    lambda recipe: (
        f"stability.on_divergence = {format_value(recipe.stability.on_divergence)} and stability.spike ="
        f" {format_value(recipe.stability.spike)}"
    ),
    'set one of these to "roll-back"',
)
_WORKERS = KeyCondition(
    lambda recipe: recipe.data.workers != 0,
    lambda recipe: "data.workers = 0",
    "set data.workers to 1 or more, or to -1",
)
_WEIGHT_DECAY = KeyCondition(
    lambda recipe: recipe.optim.weight_decay != 0,
    lambda recipe: "optim.weight_decay = 0",
    "set optim.weight_decay",
)
_CYCLED_MOMENTUM = KeyCondition(
    lambda recipe: recipe.cycles_momentum,
    lambda recipe: (
        f"schedule.kind = {format_value(recipe.schedule.kind)}, schedule.cycle_momentum ="
        f" {format_value(recipe.schedule.cycle_momentum)} and optim.name = {format_value(recipe.optim.name)}"
    ),
    'set schedule.kind = "one-cycle" with an optimizer whose momentum can change',
)
_FIXED_MOMENTUM = KeyCondition(
    lambda recipe: not recipe.cycles_momentum,
    lambda recipe: 'schedule.kind = "one-cycle", whose momentum lies between schedule.min_momentum and max_momentum',
    "set schedule.cycle_momentum = false",
)
_EPOCHS = KeyCondition(
    epochs.has_epoch_keys,
    lambda recipe: "no key in epochs",
    "set train.epochs",
)
_TELEMETRY = KeyCondition(
    lambda recipe: recipe.telemetry.enabled, lambda recipe: "telemetry.enabled = false", "set telemetry.enabled = true"
)
_PORT = KeyCondition(
    lambda recipe: recipe.telemetry.prometheus.port != 0,
    lambda recipe: "telemetry.prometheus.port = 0",
    "set that port",
)

_RESIZABLE_DATA = KeyCondition(
    lambda recipe: not _has_fixed_size(recipe), lambda recipe: recipe.data.description, "set data.path to a folder"
)

_DECODER_KEYS = (
    "head_dim", "rope_scaling", "norm_offset", "qkv_bias", "qk_norm", "activation", "scale_embeddings",
)  # fmt: skip
_WARMUP_KINDS = ("cosine", "linear", "step", "plateau", "wsd", "constant")
_SIZES = (
    "vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "max_seq_len", "rope_theta", "norm_eps",
    "tie_embeddings", "dropout", *_DECODER_KEYS,
)  # fmt: skip
# A key may have several rules, and inherits those of its tables; the first unmet one is reported.
_CONDITIONS: tuple[tuple[str, KeyCondition], ...] = (
    *((f"model.{name}", _OWN_MODEL) for name in (*_SIZES, "kind", "preset", "convnet", "two_tower")),
    *((f"model.{name}", _when_model("decoder")) for name in ("tie_embeddings", *_DECODER_KEYS)),
    *((f"model.{name}", _when_model("decoder", "two-tower")) for name in _SIZES),
    ("model.convnet", _when_model("convnet")),
    ("model.two_tower", _when_model("two-tower")),
    ("data.pattern", _when_data("text", "pairs")),
    ("data.max_bytes", _when_data("text", "pairs")),
    ("data.pattern", _RESIZABLE_DATA),
    ("data.max_bytes", _RESIZABLE_DATA),
    ("data.seq_len", _SEQUENCE_DATA),
    ("data.pack", _when_data("tokens", "chat")),
    ("data.attention", _when_data("tokens", "chat", "custom")),
    ("data.attention", _PACKED),
    ("data.tokenizer", _TOKENIZER),
    ("data.chat_template", _when_data("chat")),
    ("data.image_size", _when_data("images")),
    ("data.image_size", _RESIZABLE_DATA),
    ("data.augment", _when_data("images")),
    ("data.samples", _EPOCHS),
    ("data.prefetch", _WORKERS),
    ("objective.label_smoothing", _when_objective("cross-entropy")),
    ("objective.ignore_index", _when_objective("cross-entropy", "dpo")),
    ("objective.delta", _when_objective("huber")),
    ("objective.temperature", _when_objective("nt-xent")),
    ("objective.temperature", _TEMPERATURE),
    ("adapter", _when_value("adapter.kind", lambda recipe: recipe.adapter.kind, "lora", "dora")),
    ("optim.weight_decay_scale", _WEIGHT_DECAY),
    ("objective.group", _when_objective("nt-xent")),
    ("objective.beta", _when_objective("dpo")),
    ("optim.betas", _when_optimizer(*(name for name, entry in OPTIMIZERS.items() if entry.reads_betas))),
    ("optim.eps", _when_optimizer(*(name for name, entry in OPTIMIZERS.items() if entry.reads_eps))),
    ("optim.momentum", _when_optimizer(*(name for name, entry in OPTIMIZERS.items() if entry.reads_momentum))),
    ("optim.momentum", _FIXED_MOMENTUM),
    ("optim.nesterov", _when_optimizer("sgd")),
    ("optim.clip_norm", _when_clip("norm", "adaptive")),  # adaptive: until enough norms are known
    ("optim.clip_value", _when_clip("value")),
    ("optim.clip_quantile", _when_clip("adaptive")),
    *(
        (f"schedule.{name}", _when_schedule(*_WARMUP_KINDS))
        for name in ("warmup_steps", "warmup_ratio", "warmup_epochs")
    ),
    ("schedule.floor", _when_schedule("cosine", "linear", "plateau", "wsd")),
    *((f"schedule.{name}", _when_schedule("step")) for name in ("milestones", "milestone_epochs", "gamma")),
    ("schedule.cooldown_steps", _when_schedule("wsd")),
    *((f"schedule.{name}", _when_schedule("one-cycle")) for name in ("rise", "initial", "final", "cycle_momentum")),
    *((f"schedule.{name}", _CYCLED_MOMENTUM) for name in ("max_momentum", "min_momentum")),
    *((f"schedule.{name}", _when_schedule("plateau")) for name in ("factor", "patience", "threshold")),
    ("evaluation", _VALIDATION),
    ("contract.on_budget_spent", _BUDGET),
    ("contract.gpu_hour_cost", _BUDGET),
    *(
        (
            f"stability.{name}",
            _when_value("stability.spike", lambda recipe: recipe.stability.spike, "warn", "skip", "roll-back"),
        )
        for name in ("spike_deviations", "spike_window")
    ),
    *((f"stability.{name}", _ROLL_BACK) for name in ("max_roll_backs", "roll_back_margin")),
    *((f"telemetry.{name}", _TELEMETRY) for name in ("interval_s", "flush_s", "alerts", "prometheus")),
    ("telemetry.prometheus.address", _PORT),
    ("tracking.project", _when_tracking("wandb", "mlflow")),
    ("tracking.uri", _when_tracking("mlflow")),
    ("tracking.offline", _when_tracking("wandb")),
)
