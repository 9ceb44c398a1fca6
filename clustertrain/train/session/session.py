"""``clustertrain.session()``: the API with which a training script runs on any number of ranks and survives a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.errors import UsageError
from clustertrain.train.core.step_types import Loss, StepResult
from clustertrain.train.data.loader import Loader, MapStyleDataset, resolve_workers
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.distributed import data_parallel, grad_norm
from clustertrain.train.distributed.mesh import cores_per_rank
from clustertrain.train.distributed.precision import autocast
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.evaluation.dataset_pass import DatasetPassConfig
from clustertrain.train.evaluation.metrics import MetricFn
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.optim import build, param_groups, registry
from clustertrain.train.optim.lr_schedule import unscaled_lr
from clustertrain.train.session import evaluation_api
from clustertrain.train.session.metrics_writer import Scalar
from clustertrain.train.session.model_setup import PreparedModel, build_train_step, prepare_model
from clustertrain.train.session.runtime import (
    SessionOptions,
    SessionRuntime,
    SessionState,
    close_runtime,
    open_runtime,
)
from clustertrain.train.session.step_loop import StepLoop
from clustertrain.train.stability.clipping import Clipping

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def session(
    *,
    checkpoint_dir: str | Path | None = None,
    seed: int | None = None,
    device: str | None = None,
    timeout_s: float = 600.0,
) -> Session:
    """A :class:`Session`, to be used in a ``with`` statement.

    Args:
        checkpoint_dir: where checkpoints go; default: the run's own folder, and outside a run nowhere.
        seed: default: the recipe's, else 1.
        device: ``cpu`` or ``cuda``; default: the plan's, else cuda where there is one.
        timeout_s: how long one collective may take (s), and so how long a dead peer can hold a rank.

    Raises (on entering):
        ConfigError: plan, ranks and device do not fit each other.
        UnsuitableEnvironment: cuda was asked for and cannot be used.
    """
    folder = Path(checkpoint_dir).expanduser().absolute() if checkpoint_dir is not None else None
    return Session(SessionOptions(folder, seed, device, timeout_s))


class Session:
    """One rank of a training run."""

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._state = SessionState()
        self._prepared_model: PreparedModel | None = None
        self._runtime: SessionRuntime | None = None

    def __enter__(self) -> Self:
        self._runtime = open_runtime(self._options, self._state)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_runtime(get_runtime(self), error)

    @property
    def rank(self) -> int:
        """This rank's number over all nodes."""
        return get_runtime(self).context.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return get_runtime(self).context.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return get_runtime(self).context.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return get_runtime(self).is_main

    @property
    def device(self) -> torch.device:
        return get_runtime(self).context.device

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of all ranks, None for a single process."""
        return get_runtime(self).groups.mesh

    @property
    def seed(self) -> int:
        return get_runtime(self).seed

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._state.step

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks; set it to have ``tokens_per_s`` reported."""
        return self._state.tokens_per_step

    @tokens_per_step.setter
    def tokens_per_step(self, tokens: int) -> None:
        self._state.tokens_per_step = tokens

    def parallelize(
        self,
        model: nn.Module,
        *,
        tp_plan: Mapping[str, str] | None = None,
        freeze: Sequence[str] = (),
        unfreeze: Iterable[tuple[int, Sequence[str]]] = (),
    ) -> nn.Module:
        """``model`` on the device, replicated or sharded as the plan says. Make the optimizer after it. Collective.

        A model built on the meta device is filled by its own ``init_parameter(name, tensor, generator)``; of another
        one rank 0's values count. One in pipeline stages cannot be called: :meth:`train_step` drives it.

        Args:
            tp_plan: how tensor parallel splits it, by module name pattern: ``{"layers.*.up": "colwise", ...}`` with the
                words of ``clustertrain.train.distributed.tensor_parallel.WORDS``; default: the model's
                attribute ``tp_plan``.
            freeze: patterns of names of modules that are not trained.
            unfreeze: (step, patterns): the modules are trained by :meth:`train_step` from optimizer step number
                ``step`` on, counted from 1, and until then frozen, whatever ``freeze`` says.

        Raises:
            ConfigError: a pattern that fits nothing, nothing is left to train, or the layout does not fit the model.
        """
        if tp_plan is not None:
            model.tp_plan = dict(tp_plan)  # type: ignore[assignment]
        self._prepared_model = prepare_model(get_runtime(self), model, freeze, unfreeze)
        self._state.model = self._prepared_model.model
        return self._prepared_model.model

    def parameter_groups(
        self,
        optimizer: str = "adamw",
        *,
        weight_decay: float = build.DEFAULT_WEIGHT_DECAY,
        layer_decay: float = 1.0,
        lr_scale: Mapping[str, float] | None = None,
    ) -> list[dict[str, Any]]:
        """What of the model is trained, in groups for :meth:`optimizer`. Each has ``weight_decay``, 0 for norms, biases
        and embeddings, and ``lr_scale``, by which a :class:`LearningRate` multiplies its rate.

        Args:
            optimizer: the name of what it is for: ``muon`` and ``shampoo`` want hidden matrices apart.
            layer_decay: the rate of a layer is that of the one above it times this.
            lr_scale: by pattern of module names what the rate is multiplied by.

        Raises:
            UsageError: before :meth:`parallelize`.
            ConfigError: a pattern that fits nothing; ``layer_decay`` of a model whose layers cannot be told.
        """
        if self._prepared_model is None:
            raise UsageError("session.parameter_groups: call session.parallelize(model) first")
        return param_groups.parameter_groups(
            self._prepared_model.model,
            self._prepared_model.param_table,
            weight_decay=weight_decay,
            layer_decay=layer_decay,
            lr_scale=lr_scale,
            split_hidden=registry.get_entry(optimizer).matrices_only,
        )

    def optimizer(
        self, cls: type[torch.optim.Optimizer] | str, params: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer that fits the layout, for :meth:`train_step`. Made after :meth:`parallelize`.

        Args:
            cls: a class, or a name that ``optim.name`` of a recipe may have.
            params: parameters or groups of them; default: all of the model that are trained, for a name in the groups
                of :meth:`parameter_groups`.
            options: what ``cls`` takes (``lr`` and so on).

        Raises:
            UsageError: before :meth:`parallelize`, or a second time.
            ConfigError: an unknown name, or an optimizer of matrices for a model without.
            UnsuitableEnvironment: a package is missing.
        """
        if self._prepared_model is None:
            raise UsageError("session.optimizer: call session.parallelize(model) first")
        if self._state.train_step is not None:
            raise UsageError(
                "session.optimizer: there is an optimizer already, and train_step updates with one only",
                fix="make one optimizer with several groups: session.optimizer(cls, [{'params': ...}, ...])",
            )
        self._state.train_step = build_train_step(get_runtime(self), self._prepared_model, cls, params, options)
        return self._state.train_step.optimizer

    def train_step(
        self, batch: Any, loss_fn: Loss, *, clip_norm: float = 0.0, clip: Clipping | None = None
    ) -> StepResult:
        """One optimizer step over ``batch``, under every layout: forward, backward, reduction, clipping to a global
        norm of at most ``clip_norm`` (0: none), update. A step whose loss or gradient is not finite on any rank is
        skipped by all of them. Its loss, rate and gradient norm go into the step's row.

        Args:
            batch: ``(inputs, target)`` of this rank, or a list of such micro-batches, as a loader with ``micro_batch``
                yields them; the script may have transformed it, sample by sample. Inputs are what the model is called
                with: a tensor, a tuple, or a dict of arguments, (samples, …) each.
            loss_fn: called with (output, target); returns the mean over the samples, or a pair (sum, count) where the
                mean is over something else, tokens say: tensors without dimensions, the count also an int.
            clip: in place of ``clip_norm``: ``ct.Clipping("value", value=0.5)``, ``ct.Clipping("adaptive")``, …

        Raises:
            UsageError: before :meth:`optimizer`, or the batch is something else, or comes of a ragged loader and has
                other micro-batches; both ``clip_norm`` and ``clip``, or a norm below 0.
        """
        train_step, runtime = self._state.train_step, get_runtime(self)
        if train_step is None:
            raise UsageError("session.train_step: make the optimizer with session.optimizer(cls, ...) first")
        if clip is not None and clip_norm:
            raise UsageError("session.train_step: give clip_norm or clip, not both")
        layer_stats = runtime.metrics_processor.layer_stats_for(self.step + 1)
        clipping = clip or Clipping(norm=clip_norm)
        lr = unscaled_lr(train_step.optimizer)  # before the step: 8-bit AdamW rounds it to fp32
        result = train_step(batch, runtime.sample_positions.for_batch(batch), loss_fn, clipping, layer_stats)
        runtime.metrics_processor.record_step(result, lr)
        return result

    def loader(
        self,
        dataset: MapStyleDataset,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        workers: int = 0,
        ragged: bool = False,
        prefetch: int = 2,
        limits: Limits | None = None,
    ) -> Loader:
        """An endless iterator over this rank's part of each global batch: ``next(loader)`` once a step. Put it into the
        state.

        An item is a collated batch on the device, of ``global_batch`` samples over the data-parallel ranks; with
        ``micro_batch`` a list of batches of so many samples.

        Args:
            workers: processes that read ahead, for the whole run; -1: as many as this rank's cores allow.
            prefetch: micro-batches that each worker holds ready.
            limits: what the model takes, to name the sample that is not so.
            ragged: allow a global batch that does not divide: ranks then get different numbers of samples, which
                :meth:`train_step` accounts for and a mean over the ranks of the script's own does not.

        Raises:
            ConfigError: ``global_batch`` does not divide over the ranks and micro-batches; the data set is empty.
        """
        runtime = get_runtime(self)
        loader = Loader(
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            workers=resolve_workers(workers, self.device, cores_per_rank(runtime.context)),
            prefetch=prefetch,
            limits=limits,
            seed=self.seed,
            rank=runtime.context.data_rank,
            ranks=runtime.context.layout.data_parallel,
            device=self.device,
            ragged=ragged,
        )
        runtime.loaders.append(loader)
        return loader

    def evaluation(self) -> AbstractContextManager[None]:
        """Around an evaluation: its time is reported apart from the steps'."""
        return evaluation_api.timed_evaluation(get_runtime(self))

    def evaluate(
        self,
        data: MapStyleDataset | Iterable[Any],
        loss_fn: Loss,
        *,
        metrics: Sequence[str] | Mapping[str, MetricFn] = (),
        micro_batch: int | None = None,
        samples: int = 0,
        workers: int = 0,
        slices: Sequence[str] = (),
        group: int = 1,
        ignore_index: int = -100,
        limits: Limits | None = None,
        model: nn.Module | None = None,
    ) -> dict[str, float]:
        """``validation_loss`` and other means over ``data``, floats that are equal on all ranks and under every layout;
        of a slice ``validation_loss/NAME``. Nothing is changed by it. Collective. Empty where the ranks have agreed to
        stop: :meth:`steps` then ends the process.

        Args:
            data: a data set, of which each data-parallel rank takes its part in order; or batches (inputs, target) of
                this rank's own, the same on ranks that share them.
            loss_fn: as for :meth:`train_step`.
            metrics: names of ``evaluation.metrics``, or functions (output, target) -> (sum, count) by name.
            micro_batch: samples a rank and forward pass; default: as in training, and without a loader 8.
            samples: at most so many; 0: all.
            workers: processes that read ahead; 0: the rank itself reads.
            slices: those of the data set to tell apart; default: all that it names.
            group: neighbouring samples that are compared with each other, by a contrastive loss say.
            ignore_index: targets that the metrics leave out.
            limits: what the model takes: a sample that is not so is named.
            model: default: what :meth:`parallelize` returned.

        Raises:
            UsageError: no model.
            ConfigError: nothing to evaluate on, an unknown metric or slice, outputs that a metric cannot be told of.
        """
        model = self._state.model if model is None else model
        if model is None:
            raise UsageError("session.evaluate: call session.parallelize(model) first, or give model=...")
        runtime = get_runtime(self)
        pass_config = DatasetPassConfig(
            micro_batch or evaluation_api.default_micro_batch(runtime), samples, workers, group, limits
        )
        options = evaluation_api.MeasureOptions(metrics, slices, ignore_index)
        return evaluation_api.evaluate(runtime, model, data, loss_fn, pass_config, options)

    def evaluations(
        self,
        data: MapStyleDataset | Iterable[Any],
        loss_fn: Loss,
        *,
        every: int,
        metric: str = "validation_loss",
        higher_is_better: bool = False,
        patience: int = 0,
        rising: int = 3,
        slices: Sequence[str] = (),
        then: Callable[[float], None] | None = None,
        **options: Any,
    ) -> EvaluationSchedule:
        """Evaluations every ``every`` steps and at the end, for :meth:`steps`, which logs them with their step, keeps
        the best checkpoint by ``metric``, and ends the run after ``patience`` of them without a better one.

        Args:
            rising: so many evaluations in a row with a rising loss are worth a warning; 0: none.
            slices: where a regression is not acceptable: told with their best value.
            then: told the value of ``metric``: ``LearningRate.observe``.
            options: what :meth:`evaluate` takes.

        Raises:
            UsageError: ``every`` is below 1.
        """
        early_stopping = EarlyStopping(
            metric, higher_is_better=higher_is_better, patience=patience, rising_limit=rising, slices=slices
        )
        return EvaluationSchedule(
            lambda: self.evaluate(data, loss_fn, slices=slices, **options),
            every=every,
            early_stopping=early_stopping,
            on_value=then,
        )

    def accumulate(self, model: nn.Module, micro_batches: list[Any]) -> Iterator[Any]:
        """The micro-batches of one step; gradients travel between ranks only with the last. Scale the losses."""
        for i, micro_batch in enumerate(micro_batches):
            with data_parallel.gradient_sync(model, last=i == len(micro_batches) - 1):
                yield micro_batch

    def autocast(self) -> AbstractContextManager[object]:
        """Around the forward pass: the plan's precision."""
        return autocast(get_runtime(self).context)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the global L2 norm of the gradient to ``max_norm`` (0: do not) and return what it was: fp32, without
        dimensions, on the device and the same on all ranks. Collective, without a host sync."""
        grad_norm.reduce_partial_gradients(model.parameters())
        norm = grad_norm.total_norm(model.parameters(), self.device)
        if max_norm > 0:
            grad_norm.scale_gradients(model.parameters(), grad_norm.clip_factor(norm, max_norm))
        return norm

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks of a floating-point tensor, element by element, on the device. Collective, without a
        host sync."""
        value = value.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(value)
            value /= self.world_size
        return value

    def log(self, **scalars: Scalar) -> None:
        """Scalars of the step under way, of rank 0. A tensor is read when its value has arrived, one step later.

        Raises:
            UsageError: a value that is neither number, string, None, nor tensor; on all ranks alike.
            ConfigError: a tensor of more than one element; by :meth:`steps`, when the step ends.
        """
        get_runtime(self).metrics_processor.log(scalars)

    def poll(self) -> bool:
        """Whether all ranks have agreed to stop. Call it inside long work between two steps (evaluation), equally often
        on all ranks, and leave that work when it is true: :meth:`steps` then saves and ends the process."""
        return get_runtime(self).agreement.poll()

    @property
    def stop_requested(self) -> bool:
        """Whether this rank alone has been told to stop. Not agreed, so no reason to leave a collective."""
        return bool(get_runtime(self).flag)

    def steps(
        self,
        total: int,
        state: dict[str, Any] | None = None,
        checkpoint_every: int | str | None = None,
        keep: int | None = None,
        evaluations: EvaluationSchedule | None = None,
    ) -> Iterator[int]:
        """Yield the numbers of the steps still to do, 0 to ``total - 1``.

        Before the first one the newest checkpoint that verifies is restored into ``state``. Where the recipe wants a
        run to go back after a spike or steps that are not finite, an older one is, and lower numbers follow again. One
        is saved as often as ``checkpoint_every`` says, in the background, and at the end. When the ranks are told to
        stop, all leave at the same step: they save, unless the steps were bad or there is no time for it, and the
        process ends by SystemExit: 0 in a run, outside one 75 (1 where nothing is kept).

        Args:
            total: optimizer steps of the whole run, those before a resume among them.
            state: modules, optimizers, anything with state_dict and load_state_dict, tensors (filled in place), plain
                data (replaced in the dict). Of all but shards rank 0's is saved, and every rank gets it.
            checkpoint_every: steps, a time ("10min") or "auto", as ``every`` of the recipe's ``[checkpoint]``.
            keep: the newest checkpoints to keep; default: what the recipe says.
            evaluations: made after the steps at which they are due; the best checkpoint by them is kept too.

        Raises:
            UsageError: ``total`` is below 0, ``keep`` below 1, or, in a run, a loop before this one has got as far.
            ConfigError: ``checkpoint_every`` is none of these, or evaluations do not give the deciding metric.
            CheckpointError: checkpoints exist and none can be restored, or a save failed (on all ranks).
            Diverged: too many steps in a row were skipped, or the run has gone back too often.
        """
        if total < 0 or (keep is not None and keep < 1):
            raise UsageError(
                f"session.steps(total={total}, keep={keep}): there cannot be so many",
                fix="total must be at least 0, keep at least 1",
            )
        loop = StepLoop(get_runtime(self), total, state if state is not None else {}, evaluations)
        yield from loop.run(checkpoint_every, keep)


def get_runtime(session: Session) -> SessionRuntime:
    """Return the runtime of an open session, for clustertrain's own modules; scripts call the session's methods.

    Raises:
        UsageError: the session has not been entered.
    """
    if session._runtime is None:
        raise UsageError(
            "the session is not open", fix="use it in a with statement: with clustertrain.session() as session: ..."
        )
    return session._runtime
