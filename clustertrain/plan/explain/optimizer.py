"""Description of the optimizer."""

from __future__ import annotations

from clustertrain.config.optim import OptimSpec
from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.plan.cost.optimizer_state import OptimizerStateSize
from clustertrain.plan.layout import Layout


def describe_optimizer(
    spec: OptimSpec, layout: Layout, state: OptimizerStateSize | None, *, text: bool, adapted: bool = False
) -> str:
    """Return a one-line description.

    Args:
        state: size of the state; None if unknown.
        text: the model reads tokens.
        adapted: only adapters are trained.
    """
    parts = [f"{spec.name}{_describe_constants(spec, text=text)}"]
    if state is not None:
        parts.append(f"{state.bytes_per_param:.3g} bytes of state per {'adapter ' * adapted}parameter")
    if state is not None and state.trained_fraction < 1 and not adapted:
        parts.append(f"{state.trained_fraction:.0%} of the parameters are trained")
    if OPTIMIZERS[spec.name].matrices_only:
        parts.append("for the hidden matrices, adamw for the rest")
    if OPTIMIZERS[spec.name].needs_unsharded and _needs_gather(spec, layout):
        parts.append(
            "each parameter is updated whole by the rank that holds its state, with two exchanges per step "
            "that the predicted time excludes"
        )
    parts.append(f"weight decay {spec.weight_decay:g} except for norms, biases and embeddings")
    parts += [
        f"weight decay {spec.weight_decay * factor:g} in {pattern}"
        for pattern, factor in spec.weight_decay_scale.items()
    ]
    if spec.layer_decay != 1:
        parts.append(f"lr x {spec.layer_decay:g} for each layer below the head")
    parts += [f"lr x {factor:g} in {pattern}" for pattern, factor in spec.lr_scale.items()]
    parts += [f"frozen: {', '.join(spec.freeze)}"] if spec.freeze else []
    parts += [f"frozen until step {u.step}: {', '.join(u.modules)}" for u in spec.unfreeze]
    return "; ".join(parts)


def _describe_constants(spec: OptimSpec, *, text: bool) -> str:
    momentum = f": momentum {spec.effective_momentum:g}" + ", nesterov" * (spec.nesterov and spec.name == "sgd")
    betas = "betas {:g} and {:g}".format(*spec.resolve_betas(is_text=text))
    descriptions = {"sgd": momentum, "lars": momentum, "muon": f"{momentum}, {betas}", "adafactor": ""}
    return descriptions.get(spec.name, f": {betas}")


def _needs_gather(spec: OptimSpec, layout: Layout) -> bool:
    """Return whether sharded parameters are gathered for the update."""
    return OPTIMIZERS[spec.name].needs_unsharded and (
        layout.tp > 1 or (layout.is_sharded and layout.dp_shard * layout.cp > 1)
    )
