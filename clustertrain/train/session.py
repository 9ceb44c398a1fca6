"""``clustertrain.session()``: what a training script needs to run on any number of ranks and survive being stopped."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.manifest import Reason
from clustertrain.checkpoint.rollback import Wanted
from clustertrain.checkpoint.trouble import TooLate
from clustertrain.errors import UsageError
from clustertrain.run import beat
from clustertrain.run.events import EventLog
from clustertrain.spec.evaluation import PREFIX
from clustertrain.train import compiled, data_parallel, gradients, mesh, out_of_memory, result, seeds
from clustertrain.train import context as environment
from clustertrain.train.data import Loader, MapStyle, workers_for
from clustertrain.train.evaluation import telling
from clustertrain.train.evaluation.evaluator import Evaluator, slices_of
from clustertrain.train.evaluation.judge import Judge
from clustertrain.train.evaluation.metrics import Own, named
from clustertrain.train.evaluation.ordered import Cut, cut_up
from clustertrain.train.evaluation.periodic import Evaluations
from clustertrain.train.keeping import Keeping
from clustertrain.train.leaving import Leaving
from clustertrain.train.marks import Marks
from clustertrain.train.metrics import Scalar
from clustertrain.train.optimizers import catalogue, making, parameters
from clustertrain.train.optimizers.groups import LABEL, parameter_groups, trained
from clustertrain.train.parallelize import parallelize
from clustertrain.train.places import Places
from clustertrain.train.precision import LossScale, apply_matmul_precision, autocast
from clustertrain.train.profiling import Profiler
from clustertrain.train.recorder import Recorder
from clustertrain.train.samples import Limits
from clustertrain.train.schedule import LR_SCALE
from clustertrain.train.spending import Spending
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.stability.supervisor import Back
from clustertrain.train.stability.warnings import Warnings
from clustertrain.train.stability.watch import STATE, Watch
from clustertrain.train.step import Loss, Stepped, TrainStep
from clustertrain.train.stop import StopAgreement, StopFlag

log = logging.getLogger(__name__)

DEFAULT_SEED = 1
DEFAULT_MICRO_BATCH = 8  # of an evaluation, where nothing else tells


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
        timeout_s: how long one collective may take, and so how long a dead peer can hold a rank.

    Raises (on entering):
        ConfigError: plan and ranks do not fit each other.
        EnvironmentNotFit: cuda was asked for and cannot be used.
    """
    folder = Path(checkpoint_dir).expanduser().absolute() if checkpoint_dir is not None else None
    return Session(folder, seed, device, timeout_s)


class Session:
    """One rank of a training run. Attributes: ``rank``, ``local_rank``, ``world_size``, ``is_main``, ``device``,
    ``mesh`` (None for one process), ``seed``, ``step`` (optimizer steps done), ``tokens_per_step`` (set it to have
    ``tokens_per_s`` reported)."""

    def __init__(self, checkpoint_dir: Path | None, seed: int | None, device: str | None, timeout_s: float) -> None:
        self._checkpoint_dir = checkpoint_dir
        self._asked_seed = seed
        self._asked_device = device
        self._timeout_s = timeout_s
        self.step = 0
        self.tokens_per_step = 0
        self._loaders: list[Loader] = []
        self._places = Places(self._loaders)
        self._finished = False
        self._model: nn.Module | None = None
        self._parameters: parameters.Parameters | None = None
        self._thaws: dict[str, int] = {}
        self._train_step: TrainStep | None = None
        self._evaluated: dict[str, float] = {}  # by the step under way

    # -- opening and closing

    def __enter__(self) -> Session:
        t_begin = clock.now()
        self._context = context = environment.of_environment(device=self._asked_device)
        self._marks = Marks(context.rank_dir, context.rank, context.world_size, self._forward_s)
        self._result = result.current()
        self._flag = StopFlag(context.rank_dir)
        self._flag.install()
        threads = mesh.choose_threads(context)
        torch.set_num_threads(threads)
        self._groups = mesh.open_groups(context, self._timeout_s)
        self._spending = Spending(context, self._event)
        also = {"settle": self._in_trouble, "save": self._overdue, "budget": self._spending.over}
        self._agreement = StopAgreement(self._flag.__bool__, self._groups.stop, also)
        self._leaving = Leaving(context, self._flag, self._agreement)
        self.rank, self.local_rank, self.world_size = context.rank, context.local_rank, context.world_size
        self.is_main = context.rank == 0
        self.device = self._result.device = context.device
        self.mesh = self._groups.mesh
        recipe_seed = context.spec.recipe.train.seed if context.spec else DEFAULT_SEED
        self.seed = recipe_seed if self._asked_seed is None else self._asked_seed
        apply_matmul_precision(context)
        if context.spec is not None and context.spec.recipe.train.deterministic:
            seeds.be_deterministic()
        self._loss_scale: LossScale | None = None
        if context.precision == "fp16":
            batch = context.batch
            self._loss_scale = LossScale(
                batch.tokens_per_step * batch.micro_batch // batch.global_batch if batch and batch.global_batch else 1
            )
        seeds.seed_all(self.seed)  # the same on all ranks, so that a model built now is
        recording = self.is_main and context.run is not None and context.attempt is not None
        self._events = EventLog(context.attempt.events_of("rank-0")) if recording and context.attempt else None
        warnings = Warnings(context.stability, self._event)
        self._recorder = Recorder(context, self._marks, self._loaders, warnings)
        self._metrics = self._recorder.metrics
        self._event(
            "session_started",
            t_begin=t_begin,
            world_size=self.world_size,
            device=self.device.type,
            strategy=context.layout.strategy,
            layout=context.layout.words(),
            threads=threads,
        )
        self._profiler = self._chosen_profiler(context)
        self._keeping = Keeping(
            context, self._groups, self._checkpoint_dir, threads, self._result, self._event, self._flag.deadline
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        t_begin = clock.now()
        self._marks.enter(beat.SHUTDOWN)
        for loader in self._loaders:
            loader.close()
        leaving = error is None or (isinstance(error, SystemExit) and not error.code)
        try:
            if leaving:
                self._metrics.close()
                if self._result.ending != "stopped":
                    self._agreement.drain()
                    late = False
                    try:
                        self._keeping.settle()  # of a loop that was left before its last step
                    except TooLate as e:
                        self._keeping.given_up(self.step, e)
                        late = True
                    self._barrier()
                    # A loop of the script's own that left because of poll() has not done all its steps.
                    stopped = late or (self._agreement.agreed and not self._finished)
                    self._result.stopped() if stopped else self._result.left()
                mesh.close_groups()
            elif error is not None and self._leaving.explains(error):
                self._keeping.close()
                self._result.stopped()
                raise SystemExit(self._leaving.code(resumable=self._result.committed_step is not None)) from error
            elif error is not None:
                out_of_memory.explain(error, self._context)
                self._keeping.close()  # before the record: it says what is committed, and the agent ends what runs on
                self._result.failed(error)
        finally:
            # Without taking the groups down after a failure: that may wait for peers which are gone.
            with suppress(RuntimeError):  # a device in error would hide the first exception behind a second
                self._metrics.close(wait=False)
            with suppress(Exception):  # whatever a profile fails of must not hide how the run ended
                self._profiler.close()
            self._keeping.close()
            ending, skipped = self._result.ending, self._recorder.skipped
            self._event("session_ended", step=self.step, ending=ending, t_begin=t_begin, skipped_steps=skipped)
            if self._events is not None:
                self._events.close()
            self._marks.close()
            self._flag.uninstall()

    def _chosen_profiler(self, context: environment.RankContext) -> Profiler:
        steps = context.spec.recipe.profiled_steps if context.spec else range(0)
        folder = context.run.profiles if context.run is not None and self.is_main else None
        return Profiler(steps, folder, context.attempt.n if context.attempt else 0, self.device, self._event)

    def _in_trouble(self) -> bool:
        return self._keeping.in_trouble()

    def _overdue(self) -> bool:
        return self._keeping.overdue()

    def _barrier(self) -> None:
        if self._groups.stop is not None:
            dist.barrier(group=self._groups.stop)

    def _forward_s(self) -> float:
        return self._train_step.forward.sum_s() if self._train_step is not None else math.nan

    def _event(self, name: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.write(name, **fields)

    # -- for the script

    def parallelize(
        self,
        model: nn.Module,
        *,
        tp_plan: Mapping[str, str] | None = None,
        freeze: Sequence[str] = (),
        unfreeze: Iterable[tuple[int, Sequence[str]]] = (),
    ) -> nn.Module:
        """``model`` on the device, replicated or sharded as the plan says. Make the optimizer after it.

        A model built on the meta device is filled by its own ``init_parameter(name, tensor, generator)``.

        Args:
            tp_plan: how tensor parallel splits it, by module name pattern: ``{"layers.*.up": "colwise", ...}`` with the
                words of ``clustertrain.train.tensor_parallel.WORDS``; default: the model's attribute ``tp_plan``.
            freeze: patterns of names of modules that are not trained.
            unfreeze: (step, patterns): the modules are trained by :meth:`train_step` from optimizer step number
                ``step`` on, counted from 1, and until then frozen, whatever ``freeze`` says.

        Raises:
            ConfigError: a pattern that fits nothing, nothing is left to train, or the layout does not fit the model.
        """
        if tp_plan is not None:
            model.tp_plan = dict(tp_plan)  # type: ignore[assignment]
        self._parameters = parameters.describe(model)
        self._thaws = parameters.thaws(self._parameters, unfreeze)
        parameters.freeze(model, self._parameters, freeze, self._thaws)
        self._model = parallelize(model, self._context, self._groups, self.seed)
        return self._model

    def parameter_groups(
        self,
        optimizer: str = "adamw",
        *,
        weight_decay: float = making.DEFAULT_DECAY,
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
        if self._model is None or self._parameters is None:
            raise UsageError("session.parameter_groups: call session.parallelize(model) first")
        return parameter_groups(
            self._model,
            self._parameters,
            weight_decay=weight_decay,
            layer_decay=layer_decay,
            lr_scale=lr_scale,
            hidden_apart=catalogue.kind(optimizer).of_matrices,
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
            EnvironmentNotFit: a package is missing.
        """
        if self._model is None or self._parameters is None:
            raise UsageError("session.optimizer: call session.parallelize(model) first")
        if self._train_step is not None:
            raise UsageError(
                "session.optimizer: there is an optimizer already, and train_step updates with one only",
                fix="make one optimizer with several groups: session.optimizer(cls, [{'params': ...}, ...])",
            )
        made = making.make(
            cls,
            params,
            options,
            model=self._model,
            known=self._parameters,
            context=self._context,
            groups=self._groups,
        )
        frozen = [(self._thaws[n], p) for n, p in trained(self._model) if n in self._thaws]
        self._train_step = TrainStep(
            self._model,
            made,
            self._context,
            self._groups,
            self._loss_scale,
            event=self._event,
            frozen=lambda: [p for step, p in frozen if self.step + 1 < step],
        )
        self._recorder.watch = Watch(self._model, self._train_step.guard, self._context)
        self._say_groups(cls if isinstance(cls, str) else cls.__name__, made)
        return made

    def _say_groups(self, name: str, made: torch.optim.Optimizer) -> None:
        """Which parameters of rank 0 are trained how."""
        told = [
            {
                "group": group.get(LABEL, str(i)),
                "tensors": len(group["params"]),
                "parameters": sum(p.numel() for p in group["params"]),
                "weight_decay": group.get("weight_decay", 0.0),
                "lr_scale": group.get(LR_SCALE, 1.0),
            }
            for i, group in enumerate(made.param_groups)
        ]
        assert self._model is not None
        frozen = sum(p.numel() for p in self._model.parameters() if not p.requires_grad)
        self._event("optimizer", optimizer=name, groups=told, frozen=frozen)
        if self.is_main:
            words = "; ".join(f"{g['group']}: {g['parameters']:,} in {g['tensors']} tensors" for g in told)
            log.info("optimizer %s: %s; frozen: %s", name, words, f"{frozen:,}")

    def train_step(self, batch: Any, loss_fn: Loss, *, clip_norm: float = 0.0, clip: Clipping | None = None) -> Stepped:
        """One optimizer step over ``batch``, under every layout: forward, backward, reduction, clipping to a global
        norm of at most ``clip_norm`` (0: none), update. A step whose loss or gradient is not finite on any rank is
        skipped by all of them. Its loss, rate and gradient norm go into the step's row.

        Args:
            batch: ``(inputs, target)``, or a list of such micro-batches, as a loader with ``micro_batch`` yields them;
                the script may have transformed it, sample by sample.
            loss_fn: called with (output, target); returns the mean over the samples, or a pair (sum, count) where the
                mean is over something else, tokens say.

            clip: in place of ``clip_norm``: ``ct.Clipping("value", value=0.5)``, ``ct.Clipping("adaptive")``, …

        Raises:
            UsageError: before :meth:`optimizer`, or the batch is something else, or comes of a ragged loader and has
                other micro-batches; both ``clip_norm`` and ``clip``.
        """
        if self._train_step is None:
            raise UsageError("session.train_step: make the optimizer with session.optimizer(cls, ...) first")
        if clip is not None and clip_norm:
            raise UsageError("session.train_step: give clip_norm or clip, not both")
        look = self._recorder.looks_at_layers(self.step + 1)
        how = clip or Clipping(norm=clip_norm)
        done = self._train_step(batch, self._places.of(batch), loss_fn, how, look)
        self._recorder.stepped(done, self._train_step.optimizer)
        return done

    def loader(
        self,
        dataset: MapStyle,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        workers: int = 0,
        ragged: bool = False,
        prefetch: int = 2,
        limits: Limits | None = None,
    ) -> Loader:
        """An endless iterator over this rank's part of each global batch: ``next(loader)`` once a step. With
        ``micro_batch`` an item is a list of micro-batches. Put it into the state.

        Args:
            workers: processes that read ahead, for the whole run; -1: as many as this rank's cores allow.
            prefetch: micro-batches that each worker holds ready.
            limits: what the model takes, to name the sample that is not so.
            ragged: allow a global batch that does not divide: ranks then get different numbers of samples, which
                :meth:`train_step` accounts for and a mean over the ranks of the script's own does not.

        Raises:
            ConfigError: ``global_batch`` does not divide over the ranks and micro-batches.
        """
        made = Loader(
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            workers=workers_for(workers, self.device, mesh.cores(self._context)),
            prefetch=prefetch,
            limits=limits,
            seed=self.seed,
            rank=self._context.data_rank,
            ranks=self._context.layout.data_parallel,
            device=self.device,
            ragged=ragged,
        )
        self._loaders.append(made)
        return made

    def accumulate(self, model: nn.Module, micro_batches: list[Any]) -> Iterator[Any]:
        """The micro-batches of one step; gradients travel between ranks only with the last. Scale the losses."""
        for i, micro_batch in enumerate(micro_batches):
            with data_parallel.synchronise(model, last=i == len(micro_batches) - 1):
                yield micro_batch

    def autocast(self) -> AbstractContextManager[object]:
        """Around the forward pass: the plan's precision."""
        return autocast(self._context)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the global gradient norm (0: do not) and return what it was, without a device sync."""
        gradients.complete(model.parameters())
        norm = gradients.total_norm(model.parameters(), self.device)
        if max_norm > 0:
            gradients.scale(model.parameters(), gradients.clip_factor(norm, max_norm))
        return norm

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over all ranks, on the device and without a host sync."""
        value = value.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(value)
            value /= self.world_size
        return value

    def log(self, **scalars: Scalar) -> None:
        """Scalars of the step under way, of rank 0. A tensor is read when its value has arrived, one step later.

        Raises:
            UsageError: a value that is neither number, string, None, nor tensor; on all ranks alike.
        """
        self._recorder.log(scalars)

    def poll(self) -> bool:
        """Whether all ranks have agreed to stop. Call it inside long work between two steps (evaluation), equally often
        on all ranks, and leave that work when it is true: :meth:`steps` then saves and ends the process."""
        return self._agreement.poll()

    @property
    def stop_requested(self) -> bool:
        """Whether this rank alone has been told to stop. Not agreed, so no reason to leave a collective."""
        return bool(self._flag)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation: its time is reported apart from the steps'."""
        t_begin, started = clock.now(), clock.monotonic()
        try:
            with self._marks.during(beat.EVALUATION):
                yield
        finally:
            eval_s = clock.monotonic() - started
            self._recorder.apart(eval_s)
            self._event("evaluation", step=self.step, t_begin=t_begin, eval_s=eval_s)

    def evaluate(
        self,
        data: MapStyle | Iterable[Any],
        loss_fn: Loss,
        *,
        metrics: Sequence[str] | Mapping[str, Own] = (),
        micro_batch: int | None = None,
        samples: int = 0,
        workers: int = 0,
        slices: Sequence[str] = (),
        group: int = 1,
        ignore_index: int = -100,
        limits: Limits | None = None,
        model: nn.Module | None = None,
    ) -> dict[str, float]:
        """``validation_loss`` and other means over ``data``, equal on all ranks and under every layout; nothing is
        changed by it. Collective. Empty where the ranks have agreed to stop: :meth:`steps` then ends the process.

        Args:
            data: a data set, of which each data-parallel rank takes its part in order; or batches (inputs, target) of
                this rank's own, the same on ranks that share them.
            loss_fn: as for :meth:`train_step`.
            metrics: names of ``evaluation.metrics``, or functions (output, target) -> (sum, count) by name.
            micro_batch: samples a rank and forward pass; default: as in training.
            samples: at most so many; 0: all.
            slices: those of the data set to tell apart; default: all that it names.
            group: neighbouring samples that are compared with each other, by a contrastive loss say.
            ignore_index: targets that the metrics leave out.
            limits: what the model takes: a sample that is not so is named.
            model: default: what :meth:`parallelize` returned.

        Raises:
            UsageError: no model.
            ConfigError: nothing to evaluate on, an unknown metric or slice, outputs that a metric cannot be told of.
        """
        model = self._model if model is None else model
        if model is None:
            raise UsageError("session.evaluate: call session.parallelize(model) first, or give model=...")
        chosen = named(metrics)
        known = slices_of(data, slices, group)
        cut = Cut(micro_batch or self._usual_micro_batch(), samples, workers, group, limits)
        portions = cut_up(data, cut, self._context, self.seed, self._agreement.any)
        measure = Evaluator(model, self._context, self._groups, self.poll)
        untried = self._train_step is not None and self._train_step.untried
        with self.evaluation(), compiled.as_written(model) if untried else nullcontext():
            found = measure(portions, loss_fn, chosen, known, ignore_index)
        self._evaluated = found or {}
        return dict(self._evaluated)

    def _usual_micro_batch(self) -> int:
        if self._context.batch is not None and self._context.batch.micro_batch:
            return self._context.batch.micro_batch
        return self._loaders[0].micro_batch if self._loaders else DEFAULT_MICRO_BATCH

    def evaluations(
        self,
        data: MapStyle | Iterable[Any],
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
    ) -> Evaluations:
        """Evaluations every ``every`` steps and at the end, for :meth:`steps`, which logs them with their step, keeps
        the best checkpoint by ``metric``, and ends the run after ``patience`` of them without a better one.

        Args:
            rising: so many evaluations in a row with a rising loss are worth a warning; 0: none.
            slices: where a regression is not acceptable: told with their best value.
            then: told the value of ``metric``: ``LearningRate.observe``.
            options: what :meth:`evaluate` takes.
        """
        judge = Judge(metric, higher_is_better=higher_is_better, patience=patience, rising=rising, slices=slices)
        return Evaluations(
            lambda: self.evaluate(data, loss_fn, slices=slices, **options), every=every, judge=judge, then=then
        )

    def steps(
        self,
        total: int,
        state: dict[str, Any] | None = None,
        checkpoint_every: int | str | None = None,
        keep: int | None = None,
        evaluations: Evaluations | None = None,
    ) -> Iterator[int]:
        """Yield the numbers of the steps still to do, 0 to ``total - 1``.

        Before the first one the newest checkpoint that verifies is restored into ``state``. Where the recipe wants a
        run to go back after a spike or steps that are not finite, an older one is, and lower numbers follow again. One
        is saved as often as ``checkpoint_every`` says, in the background, and at the end. When the ranks are told to
        stop, all leave at the same step: they save, and the process ends by SystemExit: 0 in a run, outside one 75 (1
        where nothing could be saved).

        Args:
            state: modules, optimizers, anything with state_dict and load_state_dict, tensors (filled in place), plain
                data (replaced in the dict). Of all but shards rank 0's is saved, and every rank gets it.
            checkpoint_every: steps, a time ("10min") or "auto", as ``every`` of the recipe's ``[checkpoint]``.
            keep: the newest checkpoints to keep; default: what the recipe says.
            evaluations: made after the steps at which they are due; the best checkpoint by them is kept too.

        Raises:
            ConfigError: ``checkpoint_every`` is none of these, or evaluations do not give the deciding metric.
            CheckpointError: checkpoints exist and none can be restored, or a save failed (on all ranks).
            Diverged: too many steps in a row were skipped, or the run has gone back too often.
        """
        if total < 0 or (keep is not None and keep < 1):
            raise UsageError(f"steps(total={total}, keep={keep}): must be positive")
        state = state if state is not None else {}
        if self._loss_scale is not None:
            state["loss_scale"] = self._loss_scale
        if (watch := self._recorder.watch) is not None:
            state[STATE] = watch
            watch.begin(state)
        if evaluations is not None:
            state["evaluations"] = evaluations
        self._keeping.open(checkpoint_every, keep, evaluations.judge if evaluations is not None else None)
        with self._marks.during(beat.RESTORE):
            first = self.step = self._keeping.restore(state, self.seed)
        again = evaluations is not None and self._make_up(evaluations, total)
        while True:
            end = self._end(evaluations, total)
            unfinished = evaluations is not None and evaluations.is_due(self.step, end)
            stop = (self.step < end or unfinished) and self.poll()
            stop = stop or (self.step < end and self._spent())
            asked = self.step > first and self._agreement.taken("save")
            best = evaluations is not None and evaluations.is_best(self.step)
            due = asked or best or self._keeping.due(self.step)
            late = (stop or self.step == end) and self._keeping.is_late(self._agreement) and stop
            settle = not stop and self._agreement.taken("settle")
            everything = stop or due or self.step == end
            if watch is not None and (back := watch.look(self.step, everything=everything)) is not None:
                first, again = self._go_back(state, *back), False
                continue
            if stop:
                self._event("stop_agreed", step=self.step, save=not late)
            elif self.step == first + 1 < end:
                self._keeping.reserve(state)
            new = self.step > first or again
            save = self._keeping.kept and new and not late and (stop or due or self.step == end)
            reason: Reason | None = None
            if save:
                reason = "stop" if stop else "end" if self.step == end else "interval"
            if reason is not None or settle or stop:
                with self._marks.during(beat.CHECKPOINT):
                    stop = self._checkpoint(state, reason, settle=settle, stop=stop)
            if stop:
                self._leave(resumable=self._keeping.kept)
            if self.step >= end:
                self._finished = True
                self._marks.enter(beat.SHUTDOWN)
                return
            yield from self._one_step(first, end, evaluations)

    def _spent(self) -> bool:
        """Whether all ranks have heard that the run's budget is spent. They then stop as on a warning; where they go
        back at that very step, right after it."""
        if self._result.spent:
            return True
        if not self._agreement.taken("budget"):
            return False
        self._agreement.drain()
        self._result.why = self._spending.why() or None
        self._result.spent = True
        return True

    def _end(self, evaluations: Evaluations | None, total: int) -> int:
        """``total``, or the step that is reached where the evaluations say that it is enough."""
        if evaluations is None or not evaluations.over or self.step >= total:
            return total
        self._result.why = evaluations.over
        self._event("early_stop", step=self.step, why=evaluations.over)
        return self.step

    def _evaluated_now(self, evaluations: Evaluations) -> dict[str, float]:
        found = evaluations.make(self.step)
        if found:
            telling.of(evaluations, self.step, self._event, aloud=self.is_main)
        return found

    def _make_up(self, evaluations: Evaluations, total: int) -> bool:
        """Make the evaluation that a stop has cut short, and tell the row of its step once more with it."""
        if not evaluations.is_due(self.step, total):
            return False
        found = self._evaluated_now(evaluations)
        if found:
            self._metrics.put(telling.row_before(self._context, self.step), dict(found))
        return bool(found)

    def _go_back(self, state: dict[str, Any], back: Back, wanted: Wanted) -> int:
        """To the newest checkpoint before what went wrong; returns its step. Collective."""
        with self._marks.during(beat.RESTORE):
            self._metrics.drain(wait=True)
            self.step = self._keeping.go_back(state, self.seed, back, wanted)
        self._result.step = self.step
        self._recorder.went_back()
        self._profiler.close()
        self._evaluated = {}
        if not self._result.spent:
            self._result.why = None  # of evaluations that are no more
        return self.step

    def _checkpoint(self, state: dict[str, Any], reason: Reason | None, *, settle: bool, stop: bool) -> bool:
        """Save where there is a ``reason``, and wait for the saves under way to ``settle`` trouble or to ``stop``;
        returns whether to stop."""
        if reason is not None:
            self._metrics.drain(wait=True)
        try:
            if settle:
                self._keeping.settle()  # raises, on all ranks at this step
            if reason is not None:
                self._keeping.save(self.step, state, reason, self._newest())
            if stop:
                self._keeping.settle()  # where it is too late for another save, for the one that is under way
        except TooLate as e:  # on all ranks, wherever the deadline has met them
            self._keeping.given_up(self.step, e)
            return True
        return stop

    def _newest(self) -> dict[str, Any]:
        """The scalars that a checkpoint made now is judged by: what was validated before is of another model."""
        newest = self._metrics.newest.items()
        told = {k: v for k, v in newest if not k.startswith(PREFIX) or self._recorder.has_logged(k)}
        return {**told, **self._evaluated}

    def _one_step(self, first: int, total: int, evaluations: Evaluations | None) -> Iterator[int]:
        self._evaluated = {}
        t_begin = clock.now()
        self._recorder.begin(self.step)
        self._profiler.begin(self.step)
        yield self.step
        self._profiler.end(self.step)
        self.step += 1
        self._result.step = self.step
        if evaluations is not None and evaluations.is_due(self.step, total):
            self._recorder.log(self._evaluated_now(evaluations))
        self._recorder.end(self.step, self.tokens_per_step)
        if self.step == first + 1:
            self._event("first_step", step=self.step, total=total, t_begin=t_begin)

    # -- stopping

    def _leave(self, *, resumable: bool) -> None:
        self._metrics.close()
        self._result.stopped()
        self._barrier()
        raise SystemExit(self._leaving.code(resumable=resumable))
