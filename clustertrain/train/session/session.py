"""``clustertrain.session()``: the API that lets a training script run on any number of ranks and survive a stop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import ParamsT

from clustertrain.config.low_bit import BasePrecision
from clustertrain.errors import UsageError
from clustertrain.train.core.step_types import Loss, StepResult
from clustertrain.train.data.loader import Loader, MapStyleDataset, resolve_workers
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.data.streams.loader import StreamLoader
from clustertrain.train.data.streams.source import StreamSource
from clustertrain.train.distributed import data_parallel, grad_norm
from clustertrain.train.distributed.mesh import cores_per_rank
from clustertrain.train.distributed.precision import autocast
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.evaluation.dataset_pass import DatasetPassConfig
from clustertrain.train.evaluation.metrics import MetricFn
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.models import adapters
from clustertrain.train.optim import build, param_groups, registry
from clustertrain.train.optim.lr_schedule import unscaled_lr
from clustertrain.train.session import adapter_setup, evaluation_api, pretrained
from clustertrain.train.session.adapter_setup import AdapterSetup
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
    """Return a :class:`Session` to use in a ``with`` statement.

    Args:
        checkpoint_dir: folder for checkpoints; default: the run's folder; outside a run no checkpoints are saved.
        seed: default: the recipe's seed, or 1 without a recipe.
        device: ``cpu`` or ``cuda``; default: the plan's device, otherwise cuda if available.
        timeout_s: limit in seconds for one collective, and thus for how long a dead peer can block a rank.

    Raises (on entering):
        ConfigError: the plan, the ranks and the device do not match.
        UnsuitableEnvironment: cuda was requested but cannot be used.
    """
    folder = Path(checkpoint_dir).expanduser().absolute() if checkpoint_dir is not None else None
    return Session(SessionOptions(folder, seed, device, timeout_s))


T = TypeVar("T")


class Session:
    """One rank of a training run."""

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._state = SessionState()
        self._pretrained: list[pretrained.PretrainedWeights] = []
        self._adapter: AdapterSetup | None = None
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
        """The device of this rank."""
        return get_runtime(self).context.device

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of all ranks, None for a single process."""
        return get_runtime(self).groups.mesh

    @property
    def seed(self) -> int:
        """The seed of the run."""
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

    def load_pretrained(
        self, model: nn.Module, path: str | Path, *, rename: Callable[[str], str] | None = None
    ) -> nn.Module:
        """Have :meth:`parallelize` load the weights of ``model`` from a file or another run, and return ``model``.

        Call it before :meth:`parallelize`. The model may be on the meta device: each rank then reads only its own part
        of the weights. Buffers that are not in the file must have values, unless transformers computes them. The
        weights are converted to the model's dtypes. Nothing is read if the run resumes from a checkpoint. Collective.

        Call it once for each separately trained part; other modules are initialized as usual::

            session.load_pretrained(model.tower, "weights/tower")
            session.load_pretrained(model.decoder, "weights/text")
            model = session.parallelize(model)

        Args:
            model: the model, or a module of it.
            path: a safetensors file, or a folder with one or with several and their index, as ``save_pretrained``
                writes it. Or a checkpoint of another run: RUN, ``"RUN@best"``, ``"RUN@STEP"``, or its folder.
            rename: returns the name in the file for the name of a tensor in ``model.state_dict()``; default: the same.

        Raises:
            NotFound: a file, the run or its checkpoint is missing.
            ConfigError: a file is damaged, or its tensors are not those of the model; the error lists the differences.
            CheckpointError: a checkpoint is not committed, or damaged.
        """
        runtime = get_runtime(self)
        weights = pretrained.name_weights(model, Path(path), rename)
        if not runtime.checkpointer.has_committed():
            weights = pretrained.resolve(runtime, weights)
            weights.check()
        self._pretrained = [w for w in self._pretrained if w.model is not model] + [weights]
        return model

    def add_adapters(
        self,
        model: nn.Module,
        target_modules: Sequence[str],
        *,
        kind: Literal["lora", "dora"] = "lora",
        rank: int = 16,
        alpha: float = 32.0,
        rank_stabilized: bool = False,
        dropout: float = 0.0,
        base_precision: BasePrecision = "unchanged",
        init: str | Path = "",
        rename: Callable[[str], str] | None = None,
    ) -> nn.Module:
        """Freeze ``model``, give Linear layers low-rank adapters, and return ``model``. Call it before
        :meth:`parallelize`.

        The layers keep their parameters and names; each gets the parameters ``lora_A`` (rank, in_features) and
        ``lora_B`` (out_features, rank), and with ``"dora"`` also ``lora_magnitude_vector`` (out_features,).

        Args:
            target_modules: patterns of module names: each Linear layer that matches, or is inside a module that
                matches, gets an adapter.
            kind, rank, alpha, rank_stabilized, dropout, base_precision: as in the recipe's ``[adapter]``.
            init: folder of an adapter to start from, in the format of PEFT. Its values are not read if the run resumes
                from a checkpoint.
            rename: returns the name in PEFT's files for the name of a layer of ``model``; default: the same.

        Raises:
            ConfigError: a value is out of range; a pattern matches no Linear layer, or a fused one; the rank exceeds a
                side of a matrix; the model has adapters already; ``init`` is an adapter of another kind or model.
            NotFound: a file of ``init`` is missing.
            UsageError: :meth:`parallelize` was called before.
        """
        if self._prepared_model is not None:
            raise UsageError(
                "session.add_adapters: the model is parallelized already", fix="call it before session.parallelize"
            )
        spec = adapters.build_spec(
            kind=kind,
            rank=rank,
            alpha=alpha,
            rank_stabilized=rank_stabilized,
            dropout=dropout,
            base_precision=base_precision,
            target_modules=target_modules,
            init=str(init),
        )
        before = dict(model.named_modules())
        self._adapter = adapter_setup.add(model, spec, get_runtime(self).seed, rename)
        # Frozen matrices in fewer bits are modules of their own, which may be parts with weights.
        after = dict(model.named_modules())
        self._pretrained = pretrained.follow_replacements(self._pretrained, {m: after[n] for n, m in before.items()})
        return model

    def parallelize(
        self,
        model: nn.Module,
        *,
        tp_plan: Mapping[str, str] | None = None,
        freeze: Sequence[str] = (),
        unfreeze: Iterable[tuple[int, Sequence[str]]] = (),
    ) -> nn.Module:
        """Return ``model`` on the device, replicated or sharded as planned. Build the optimizer afterwards. Collective.

        After :meth:`load_pretrained`, the model's weights are read from its files. Otherwise a model on the meta device
        is initialized by its ``init_parameter(name, tensor, generator)``; for any other model rank 0's values are
        broadcast. A model in pipeline stages cannot be called: :meth:`train_step` drives it.

        Args:
            tp_plan: how tensor parallelism splits the model: a style by module name pattern, such as
                ``{"layers.*.up": "colwise", ...}``, with the styles in
                ``clustertrain.train.distributed.tensor_parallel.STYLES``; default: the model's attribute ``tp_plan``.
            freeze: name patterns of modules that are not trained.
            unfreeze: (step, patterns): :meth:`train_step` trains these modules from optimizer step ``step`` on,
                counted from 1; until then they are frozen, whether or not ``freeze`` matches them.

        Raises:
            ConfigError: a pattern matches nothing, nothing is left to train, the model has adapters and ``freeze`` or
                ``unfreeze`` is given, or the layout does not fit the model.
        """
        if tp_plan is not None:
            model.tp_plan = dict(tp_plan)  # type: ignore[assignment]
        adapter = self._adapter if self._adapter is not None and self._adapter.model is model else None
        self._prepared_model = prepare_model(
            get_runtime(self), model, freeze, list(unfreeze), self._pretrained, adapter
        )
        self._state.model = self._prepared_model.model
        return self._prepared_model.model

    def parameter_groups(
        self,
        optimizer: str = "adamw",
        *,
        weight_decay: float = build.DEFAULT_WEIGHT_DECAY,
        layer_decay: float = 1.0,
        lr_scale: Mapping[str, float] | None = None,
        weight_decay_scale: Mapping[str, float] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the trainable parameters in groups for :meth:`optimizer`.

        Each group has ``weight_decay``, 0 for norms, biases and embeddings, and ``lr_scale``, a factor that
        :class:`LearningRate` applies to the group's learning rate.

        Args:
            optimizer: name of the optimizer; ``muon`` and ``shampoo`` need hidden matrices in groups of their own.
            layer_decay: learning rate of a layer divided by that of the next layer toward the output.
            lr_scale: learning rate factor by module name pattern.
            weight_decay_scale: weight decay factor by module name pattern.

        Raises:
            UsageError: :meth:`parallelize` was not called.
            ConfigError: a pattern matches nothing, or ``layer_decay`` is set but the order of the layers is unknown.
        """
        if self._prepared_model is None:
            raise UsageError("session.parameter_groups: call session.parallelize(model) first")
        return param_groups.parameter_groups(
            self._prepared_model.model,
            self._prepared_model.param_table,
            weight_decay=weight_decay,
            layer_decay=layer_decay,
            lr_scale=lr_scale,
            weight_decay_scale=weight_decay_scale,
            split_hidden=registry.get_entry(optimizer).matrices_only,
        )

    def optimizer(
        self, cls: type[torch.optim.Optimizer] | str, params: ParamsT | None = None, **options: object
    ) -> torch.optim.Optimizer:
        """Build the optimizer for :meth:`train_step`, adapted to the layout. Call it after :meth:`parallelize`.

        Args:
            cls: a class, or a value of the recipe key ``optim.name``.
            params: parameters or parameter groups; default: all trainable parameters; if ``cls`` is a name, in the
                groups of :meth:`parameter_groups`.
            options: arguments of ``cls``, such as ``lr``.

        Raises:
            UsageError: :meth:`parallelize` was not called, or the session already has an optimizer.
            ConfigError: the name is unknown, or the optimizer is for matrices and the model has none.
            UnsuitableEnvironment: a package is missing.
        """
        if self._prepared_model is None:
            raise UsageError("session.optimizer: call session.parallelize(model) first")
        if self._state.train_step is not None:
            raise UsageError(
                "session.optimizer: the session already has an optimizer, and train_step supports only one",
                fix="create one optimizer with several groups: session.optimizer(cls, [{'params': ...}, ...])",
            )
        self._state.train_step = build_train_step(get_runtime(self), self._prepared_model, cls, params, options)
        return self._state.train_step.optimizer

    def train_step(
        self, batch: Any, loss_fn: Loss, *, clip_norm: float = 0.0, clip: Clipping | None = None
    ) -> StepResult:
        """Run one optimizer step on ``batch``: forward, backward, gradient reduction, clipping, update. Collective.

        If the loss or the gradient is NaN or Inf on any rank, all ranks skip the update. The loss, learning rate and
        gradient norm go into the step's row of metrics.

        Args:
            batch: this rank's ``(inputs, target)``, or a list of such micro-batches, as a loader with ``micro_batch``
                yields them; the script may transform each sample. Inputs are a tensor, a tuple, or a dict of arguments
                for the model, each of shape (samples, …).
            loss_fn: called with (output, target); returns the mean over the samples, or a pair (sum, count) for a mean
                over something else, such as tokens. All are 0-dimensional tensors; the count may be an int.
            clip_norm: limit for the global gradient norm; 0: no clipping.
            clip: instead of ``clip_norm``: ``ct.Clipping("value", value=0.5)``, ``ct.Clipping("adaptive")``, …

        Raises:
            UsageError: there is no optimizer, the batch has a different form, or it comes from a ragged loader and its
                micro-batches were changed; both ``clip_norm`` and ``clip`` are given, or a norm is below 0.
        """
        train_step, runtime = self._state.train_step, get_runtime(self)
        if train_step is None:
            raise UsageError("session.train_step: create the optimizer with session.optimizer(cls, ...) first")
        if clip is not None and clip_norm:
            raise UsageError("session.train_step: give clip_norm or clip, not both")
        layer_stats = runtime.metrics_processor.layer_stats_for(self.step + 1)
        noise = runtime.metrics_processor.noise_scale_for(self.step + 1)
        clipping = clip or Clipping(norm=clip_norm)
        lr = unscaled_lr(train_step.optimizer)  # read before the step: 8-bit AdamW rounds it to fp32
        result = train_step(batch, runtime.sample_positions.for_batch(batch), loss_fn, clipping, layer_stats, noise)
        runtime.metrics_processor.record_step(result, lr)
        return result

    def loader(
        self,
        dataset: MapStyleDataset | StreamSource,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        workers: int = 0,
        ragged: bool = False,
        prefetch: int = 2,
        limits: Limits | None = None,
    ) -> Loader:
        """Return an endless iterator over this rank's part of each global batch.

        Call ``next(loader)`` once per step, and put the loader into the state of :meth:`steps`. An item is a collated
        batch on the device; with ``micro_batch`` it is a list of batches of that many samples.

        Args:
            dataset: map-style data; a ``StreamSource`` is what the built-in trainer passes for a stream.
            global_batch: samples per step over all data-parallel ranks.
            workers: processes that read ahead during the whole run; -1: as many as this rank's cores allow.
            prefetch: micro-batches that each worker keeps ready.
            limits: limits of the model; a sample outside them raises an error that names it.
            ragged: allow a global batch that does not divide evenly: ranks then get different numbers of samples.
                :meth:`train_step` accounts for this; a plain mean over the ranks does not.

        Raises:
            ConfigError: ``global_batch`` does not divide over the ranks and micro-batches, or the dataset is empty.
        """
        runtime = get_runtime(self)
        shared: dict[str, Any] = {
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "limits": limits,
            "seed": self.seed,
            "rank": runtime.context.data_rank,
            "ranks": runtime.context.layout.data_parallel,
            "device": self.device,
            "ragged": ragged,
        }
        loader: Loader
        if isinstance(dataset, StreamSource):
            loader = StreamLoader(dataset, **shared)
        else:
            num_workers = resolve_workers(workers, self.device, cores_per_rank(runtime.context))
            loader = Loader(dataset, workers=num_workers, prefetch=prefetch, **shared)
        runtime.loaders.append(loader)
        return loader

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a context manager that reports the time of its block as evaluation, not as training."""
        return evaluation_api.timed_evaluation(get_runtime(self))

    def evaluate(
        self,
        data: MapStyleDataset | Iterable[object],
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
        save_predictions: int = 0,
        keep_predictions: Callable[[], Collection[int]] = tuple,
        model: nn.Module | None = None,
    ) -> dict[str, float]:
        """Return ``validation_loss`` and the metrics, means over ``data`` that are equal on all ranks. Collective.

        The values do not depend on the layout; those of a slice are named ``validation_loss/NAME``. Module modes,
        gradients, buffers and random generators stay as they were. The result is empty if the ranks have agreed to
        stop: :meth:`steps` then ends the process.

        Args:
            data: a dataset, split over the data-parallel ranks in order; or this rank's batches (inputs, target), the
                same on ranks that share a part of the batch.
            loss_fn: as for :meth:`train_step`.
            metrics: names from ``evaluation.metrics``, or functions (output, target) -> (sum, count) by name.
            micro_batch: samples per rank and forward pass; default: as in training, or 8 without a loader.
            samples: evaluate at most this many; 0: all.
            workers: processes that read ahead; 0: the rank itself reads; -1: as many as this rank's cores allow.
            slices: slices of the dataset to report; default: all that it names.
            group: number of adjacent samples that are compared with each other, for example by a contrastive loss; for
                a :class:`ContrastiveLoss` of the whole global batch, default: the global batch of training.
            ignore_index: target value that the metrics exclude.
            limits: limits of the model; a sample outside them raises an error that names it.
            save_predictions: write the predictions of this many samples to the run's folder; 0: none.
            keep_predictions: returns the steps of earlier evaluations whose predictions are not deleted.
            model: default: the result of :meth:`parallelize`.

        Raises:
            UsageError: there is no model, or ``save_predictions`` of batches.
            ConfigError: ``data`` is empty, a metric or slice is unknown, or the outputs do not fit a metric.
        """
        model = self._state.model if model is None else model
        if model is None:
            raise UsageError("session.evaluate: call session.parallelize(model) first, or pass model=...")
        runtime = get_runtime(self)
        pass_config = DatasetPassConfig(
            micro_batch or evaluation_api.default_micro_batch(runtime), samples, workers, group, limits
        )
        options = evaluation_api.MeasureOptions(metrics, slices, ignore_index, save_predictions, keep_predictions)
        return evaluation_api.evaluate(runtime, model, data, loss_fn, pass_config, options)

    def evaluations(
        self,
        data: MapStyleDataset | Iterable[object],
        loss_fn: Loss,
        *,
        every: int,
        metric: str = "validation_loss",
        higher_is_better: bool = False,
        patience: int = 0,
        warn_when_rising: int = 3,
        slices: Sequence[str] = (),
        on_value: Callable[[float], None] | None = None,
        **options: Any,
    ) -> EvaluationSchedule:
        """Return a schedule for :meth:`steps` of evaluations every ``every`` steps and at the end.

        :meth:`steps` logs each evaluation with its step, keeps the best checkpoint by ``metric``, and ends the run
        after ``patience`` evaluations without an improvement (0: never).

        Args:
            warn_when_rising: warn after this many evaluations in a row with a rising loss; 0: never.
            slices: slices that must not regress; they are reported with their best value.
            on_value: called with the value of ``metric``, for example ``LearningRate.observe``.
            options: further arguments of :meth:`evaluate`.

        Raises:
            UsageError: ``every`` is below 1.
        """
        early_stopping = EarlyStopping(
            metric, higher_is_better=higher_is_better, patience=patience, rising_limit=warn_when_rising, slices=slices
        )
        return EvaluationSchedule(
            lambda: self.evaluate(data, loss_fn, slices=slices, keep_predictions=early_stopping.best_steps, **options),
            every=every,
            early_stopping=early_stopping,
            on_value=on_value,
        )

    def accumulate(self, model: nn.Module, micro_batches: list[T]) -> Iterator[T]:
        """Yield the micro-batches of one step; gradients are reduced only with the last one.

        The script must scale the losses.
        """
        for i, micro_batch in enumerate(micro_batches):
            with data_parallel.gradient_sync(model, last=i == len(micro_batches) - 1):
                yield micro_batch

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context manager for the forward pass, with the plan's precision."""
        return autocast(get_runtime(self).context)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the global L2 norm of the gradient to ``max_norm`` (0: no clipping) and return the norm before clipping.

        The norm is a 0-dimensional fp32 tensor on the device, equal on all ranks. Collective, without a host sync.
        """
        grad_norm.reduce_partial_gradients(model.parameters())
        norm = grad_norm.total_norm(model.parameters(), self.device)
        if max_norm > 0:
            grad_norm.scale_gradients(model.parameters(), grad_norm.clip_factor(norm, max_norm))
        return norm

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the elementwise mean of a floating-point tensor over all ranks, on the device.

        Collective, without a host sync.
        """
        value = value.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(value)
            value /= self.world_size
        return value

    def log(self, **scalars: Scalar) -> None:
        """Add scalars of rank 0 to the row of the current step. A tensor is read one step later, without waiting.

        Raises:
            UsageError: on all ranks, if a value is not a number, a string, None or a tensor.
            ConfigError: a tensor does not have exactly one element; raised by :meth:`steps` at the end of the step.
        """
        get_runtime(self).metrics_processor.log(scalars)

    def poll(self) -> bool:
        """Return whether all ranks have agreed to stop. Collective.

        Call it during long work between two steps, equally often on all ranks, and stop that work once it returns true:
        :meth:`steps` then saves and ends the process.
        """
        return get_runtime(self).agreement.poll()

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop. Other ranks may not know yet, so never skip a collective based on it."""
        return bool(get_runtime(self).flag)

    def steps(
        self,
        total: int,
        state: dict[str, Any] | None = None,
        checkpoint_every: int | str | None = None,
        keep: int | None = None,
        evaluations: EvaluationSchedule | None = None,
    ) -> Iterator[int]:
        """Yield the numbers of the remaining steps, up to ``total - 1``.

        They start at 0, while ``status``, the log and checkpoints count the steps done: after step 0 these say 1.

        Before the first step, the newest checkpoint that verifies is restored into ``state``. If the recipe rolls back
        after loss spikes or NaN and Inf, an older checkpoint is restored and its lower step numbers are yielded again.
        Checkpoints are saved in the background every ``checkpoint_every``, and at the end. On a request to stop, all
        ranks leave the loop at the same step. They save, unless the last steps were bad or there is no time left, and
        the process ends with SystemExit: code 0 in a run; outside a run 75, or 1 without checkpoints.

        Args:
            total: optimizer steps of the whole run, including those before a resume.
            state: modules, optimizers, objects with state_dict and load_state_dict, tensors (filled in place) and plain
                data (replaced in the dict). Unsharded entries are saved from rank 0 and loaded on every rank.
            checkpoint_every: a number of steps, a time ("10min") or "auto", as ``every`` in the recipe's
                ``[checkpoint]``; None: only at the end.
            keep: how many of the newest checkpoints to keep; default: the recipe's value.
            evaluations: evaluations to run at the steps where they are due; the best checkpoint is kept too.

        Raises:
            UsageError: ``total`` is below 0, ``keep`` is below 1, or an earlier loop of the run ended at ``total`` or
                later.
            ConfigError: ``checkpoint_every`` is invalid, or the evaluations do not produce the deciding metric.
            CheckpointError: checkpoints exist and none can be restored, or a save failed (on all ranks).
            Diverged: too many steps in a row were skipped, or the run has rolled back too often.
        """
        if total < 0 or (keep is not None and keep < 1):
            raise UsageError(
                f"session.steps(total={total}, keep={keep}): total must be at least 0 and keep at least 1",
                fix="pass the optimizer steps of the whole run, and how many checkpoints to keep",
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
