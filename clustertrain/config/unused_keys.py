"""Which keys of a recipe a run goes by: those of its kind of model, schedule and so on. One that is written and that
nothing reads is refused, or told of, as who has written it meant something by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from clustertrain.config.data import DIGITS
from clustertrain.config.job import RunSpec
from clustertrain.config.parsing import text_of
from clustertrain.config.recipe import Recipe
from clustertrain.config.script_keys import of_trainer
from clustertrain.errors import ConfigError


@dataclass(frozen=True)
class Only:
    """What some recipes go by. ``now`` says what stands against it in this one, ``instead`` what to do besides removing
    the key."""

    read: Callable[[Recipe], bool]
    now: Callable[[Recipe], str]
    instead: str


def in_use(spec: RunSpec, key: str) -> bool:
    """Whether a run goes by ``key`` of its recipe, as ``optim.lr``."""
    return why_not(spec.recipe, key) is None if spec.script is None else not of_trainer(key)


def why_not(recipe: Recipe, key: str) -> Only | None:
    """Why a run of ``recipe`` does not go by ``key``, as ``optim.lr``; None where it does."""
    return next((only for name, only in _ONLY if f"{key}.".startswith(f"{name}.") and not only.read(recipe)), None)


def unread(document: Mapping[str, Any], recipe: Recipe) -> dict[str, Only]:
    """Keys of ``document``, from which ``recipe`` was made, that a run of it does not go by, and why. One whose value
    says what holds without it too is none of them."""
    found = {key: why_not(recipe, key) for key, value in written(document) if not _asks_for_nothing(key, value)}
    return {key: only for key, only in found.items() if only is not None}


def refuse(found: Mapping[str, Only], recipe: Recipe, source: str) -> None:
    """Raises ConfigError for the first of ``found``, with the others that are so for the same reason."""
    for said, keys, instead in _sentences(found, recipe):
        raise ConfigError(f"{source}: {said}", fix=f"remove {'it' if len(keys) == 1 else 'them'}, or {instead}")


def notes(found: Mapping[str, Only], recipe: Recipe) -> list[str]:
    """A sentence for each reason."""
    return [said for said, _, _ in _sentences(found, recipe)]


def _sentences(found: Mapping[str, Only], recipe: Recipe) -> Iterator[tuple[str, list[str], str]]:
    """(what is so, the keys, what to do besides removing them), a reason each."""
    keys_of: dict[tuple[str, str], list[str]] = {}
    for key, only in found.items():
        keys_of.setdefault((only.now(recipe), only.instead), []).append(key)
    for (now, instead), keys in keys_of.items():
        yield f"{' and '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect with {now}", keys, instead


def written(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of ``document``, as ``optim.lr``, with their values."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from written(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


# Where 0 says that something is off, and the default is another number. Of a limit of alerts it does so too.
_OFF_AT_0 = (
    "optim.clip_norm",
    "optim.momentum",
    "schedule.warmup_steps",
    "schedule.cooldown_steps",
    "evaluation.rising",
)


def _asks_for_nothing(key: str, value: Any) -> bool:
    """Whether ``value`` says what holds without it too: it is the default, or turns something off."""
    if value is False or (value == 0 and (key in _OFF_AT_0 or key.startswith("telemetry.alerts."))):
        return True
    default: Any = msgspec.to_builtins(Recipe())
    for part in key.split("."):
        default = default.get(part) if isinstance(default, Mapping) else None
    return bool(value == (list(default) if isinstance(default, tuple) else default))


def _with(key: str, of: Callable[[Recipe], str], *values: str) -> Only:
    """Read where ``key`` has one of ``values``; ``of`` says which it has, and is never "auto"."""
    return Only(
        lambda recipe: of(recipe) in values,
        lambda recipe: f"{key} = {text_of(of(recipe))}",
        f"set {key} = {' or '.join(map(text_of, values))}",
    )


def _schedule(*kinds: str) -> Only:
    return _with("schedule.kind", lambda recipe: recipe.schedule.kind, *kinds)


def _optim(*names: str) -> Only:
    return _with("optim.name", lambda recipe: recipe.optim.name, *names)


def _clip(*ways: str) -> Only:
    return _with("optim.clip", lambda recipe: recipe.optim.clip, *ways)


def _objective(*kinds: str) -> Only:
    return _with("objective.kind", lambda recipe: recipe.objective_kind, *kinds)


def _model(*kinds: str) -> Only:
    return _with("model.kind", lambda recipe: recipe.model.kind, *kinds)


def _data(*kinds: str) -> Only:
    return _with("data.kind", lambda recipe: recipe.data_kind, *kinds)


def _tracking(*trackers: str) -> Only:
    return Only(
        lambda recipe: any(name in recipe.tracking.to for name in trackers),
        lambda recipe: f"tracking.to = {text_of(recipe.tracking.to)}",
        f"set tracking.to = {' or '.join(text_of([name]) for name in trackers)}",
    )


def _has_its_own(recipe: Recipe) -> bool:
    """Whether all data of ``recipe`` is of a size that nothing changes."""
    data, kind = recipe.data, recipe.data_kind
    return all(
        (kind in ("images", "pairs") and path == DIGITS) or (kind == "images" and path.endswith(".npz"))
        for path in (data.path, data.validation_path or data.path)
    )


_OWN_MODEL = Only(
    lambda recipe: not recipe.model.entry,
    lambda recipe: f"model.entry = {text_of(recipe.model.entry)}",
    "give it in model.args, which the entry is called with",
)
_LENGTH = Only(
    lambda recipe: recipe.is_text or recipe.model.is_decoder,
    lambda recipe: f"data.kind = {text_of(recipe.data_kind)}",
    'set data.kind = "text", "tokens" or "pairs"',
)
_TEMPERATURE = Only(
    lambda recipe: recipe.model.kind != "two-tower",
    lambda recipe: 'model.kind = "two-tower"',
    "set model.two_tower.temperature",
)
_VALIDATION = Only(
    lambda recipe: recipe.data.validates,
    lambda recipe: "no data to validate on",
    "set data.validation or data.validation_path",
)
_BUDGET = Only(
    lambda recipe: recipe.contract.has_budget,
    lambda recipe: "no budget",
    "set contract.gpu_hours, contract.wall_hours or contract.cost",
)
_ROLL_BACK = Only(
    lambda recipe: recipe.stability.rolls_back,
    lambda recipe: (
        f"stability.then = {text_of(recipe.stability.then)} and stability.spike = {text_of(recipe.stability.spike)}"
    ),
    'set one of these to "roll-back"',
)
_WORKERS = Only(
    lambda recipe: recipe.data.workers != 0,
    lambda recipe: "data.workers = 0",
    "set data.workers to 1 or more, or to -1",
)
_TELEMETRY = Only(
    lambda recipe: recipe.telemetry.enabled, lambda recipe: "telemetry.enabled = false", "set telemetry.enabled = true"
)
_PORT = Only(
    lambda recipe: recipe.telemetry.prometheus.port != 0,
    lambda recipe: "telemetry.prometheus.port = 0",
    "set that port",
)

_OTHER_DATA = Only(
    lambda recipe: not _has_its_own(recipe), lambda recipe: recipe.data.words, "set data.path to a folder"
)

_SIZES = (
    "vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "max_seq_len", "rope_theta", "norm_eps",
    "tie_embeddings", "dropout",
)  # fmt: skip
_ADAM = ("adamw", "adam", "lamb", "muon", "soap", "shampoo", "adamw8bit")  # or it is beside them
# Of a key's several rules, and of those of the tables around it, the first one counts that stands against it.
_ONLY: tuple[tuple[str, Only], ...] = (
    *((f"model.{name}", _OWN_MODEL) for name in (*_SIZES, "kind", "preset", "convnet", "two_tower")),
    ("model.tie_embeddings", _model("decoder")),
    *((f"model.{name}", _model("decoder", "two-tower")) for name in _SIZES),
    ("model.convnet", _model("convnet")),
    ("model.two_tower", _model("two-tower")),
    ("data.pattern", _data("text", "pairs")),
    ("data.max_bytes", _data("text", "pairs")),
    ("data.pattern", _OTHER_DATA),
    ("data.max_bytes", _OTHER_DATA),
    ("data.seq_len", _LENGTH),
    ("data.pack", _data("tokens")),
    ("data.image_size", _data("images")),
    ("data.image_size", _OTHER_DATA),
    ("data.augment", _data("images")),
    ("data.prefetch", _WORKERS),
    ("objective.label_smoothing", _objective("cross-entropy")),
    ("objective.ignore_index", _objective("cross-entropy")),
    ("objective.delta", _objective("huber")),
    ("objective.temperature", _objective("nt-xent")),
    ("objective.temperature", _TEMPERATURE),
    ("optim.betas", _optim(*_ADAM, "lion")),
    ("optim.eps", _optim(*_ADAM)),
    ("optim.momentum", _optim("sgd", "lars", "muon")),
    ("optim.nesterov", _optim("sgd")),
    ("optim.clip_norm", _clip("norm", "adaptive")),  # adaptive: until there are norms enough
    ("optim.clip_value", _clip("value")),
    ("optim.clip_quantile", _clip("adaptive")),
    ("schedule.warmup_steps", _schedule("cosine", "linear", "step", "plateau", "wsd", "constant")),
    ("schedule.floor", _schedule("cosine", "linear", "plateau", "wsd")),
    *((f"schedule.{name}", _schedule("step")) for name in ("milestones", "gamma")),
    ("schedule.cooldown_steps", _schedule("wsd")),
    *((f"schedule.{name}", _schedule("one-cycle")) for name in ("rise", "initial", "final")),
    *((f"schedule.{name}", _schedule("plateau")) for name in ("factor", "patience", "threshold")),
    ("evaluation", _VALIDATION),
    ("contract.when_spent", _BUDGET),
    ("contract.gpu_hour_cost", _BUDGET),
    *(
        (
            f"stability.{name}",
            _with("stability.spike", lambda recipe: recipe.stability.spike, "warn", "skip", "roll-back"),
        )
        for name in ("spike_deviations", "spike_window")
    ),
    *((f"stability.{name}", _ROLL_BACK) for name in ("max_roll_backs", "roll_back_margin")),
    *((f"telemetry.{name}", _TELEMETRY) for name in ("interval_s", "flush_s", "comment", "alerts", "prometheus")),
    ("telemetry.prometheus.address", _PORT),
    ("tracking.project", _tracking("wandb", "mlflow")),
    ("tracking.uri", _tracking("mlflow")),
    ("tracking.offline", _tracking("wandb")),
)
