"""Check the data: samples as the model sees them, labels, duplicates, NaN and Inf, and whether targets match inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import xxhash

from clustertrain.diagnose.checks import label_alignment
from clustertrain.diagnose.checks.answers import AnswerFindings, check_answers
from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Verdict, worst_verdict
from clustertrain.diagnose.subject import Subject, infer_num_classes, model_output, to_device
from clustertrain.train.core.step_types import DOCUMENT_STARTS
from clustertrain.train.data import permutation
from clustertrain.train.data.describe import find_document_lengths, find_padding_fraction, format_documents
from clustertrain.train.data.sample_checks import format_samples
from clustertrain.train.data.streams.source import as_map_style

MAX_SAMPLES = 1024  # to check, in the run's order and therefore from the whole dataset
CONTIGUOUS_SAMPLES = 1024  # to check for shifted labels, in the dataset's order
MAX_SHOWN = 4
MAX_DUPLICATE_SHARE = 0.1  # of the samples
MAX_CLASS_SHARE = 0.9  # of the labels
MAX_INPUT_SCALE = 10.0  # of mean and standard deviation, and its inverse for the latter
MAX_TEXT_CHARS = 40  # shown per sample

Note = tuple[Verdict, str, str]  # (verdict, text, fix)


@dataclass
class SampleStats:
    """Statistics of the checked samples."""

    indices: list[int]
    """Dataset indices of the samples."""
    input_hashes: Counter[str] = field(default_factory=Counter)
    non_finite: list[int] = field(default_factory=list)
    """Dataset indices of the samples with NaN or Inf."""
    shapes: Counter[str] = field(default_factory=Counter)
    """Number of samples by types and shapes of inputs and target."""
    labels: list[torch.Tensor] = field(default_factory=list)
    """The integer targets."""
    float_moments: tuple[int, float, float] = (0, 0.0, 0.0)
    """Number, mean and sum of squared deviations from the mean, of the floating-point inputs that are finite."""
    target_hashes: dict[str, set[str]] = field(default_factory=dict)
    """Hashes of the targets by hash of the inputs."""

    @property
    def float_scale(self) -> tuple[float, float] | None:
        """Return mean and standard deviation of the floating-point inputs; None without any."""
        count, mean, squares = self.float_moments
        return (mean, math.sqrt(squares / count)) if count else None

    @property
    def duplicates(self) -> int:
        """Return the number of samples whose inputs occurred before."""
        return sum(n - 1 for n in self.input_hashes.values())


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    task = subject.build_task()
    dataset = as_map_style(task.dataset)
    size = len(dataset)
    if size < 1:
        return Finding(check="data", verdict="fail", text="the dataset is empty", fix="provide at least one sample")
    indices = permutation.samples_at(subject.recipe.train.seed, size, 0, min(size, MAX_SAMPLES))
    stats = SampleStats(indices)
    for i, index in enumerate(indices):
        add_sample(stats, index, dataset[index])
        on_progress(i + 1, len(indices) + CONTIGUOUS_SAMPLES)
    num_classes = _infer_classes(subject, dataset)
    has_labels = subject.recipe.objective_kind != "nt-xent"  # nt-xent targets only number the samples
    has_unique_target = has_labels and not subject.recipe.is_text  # equal text may continue in several ways
    notes = [
        *assess_values(stats, dataset, has_unique_target=has_unique_target),
        *assess_scale(stats),
        *assess_labels(stats, num_classes, subject),
        *_assess_validation_overlap(task, stats),
    ]
    alignment_notes, alignment_evidence = _assess_alignment(subject, dataset, on_progress) if has_labels else ([], {})
    notes += alignment_notes
    answers = check_answers(subject.recipe) if subject.recipe.data_kind == "chat" else AnswerFindings()
    notes += answers.notes
    verdict = worst_verdict(v for v, _, _ in notes)
    reported = [n for n in notes if n[0] == verdict]
    preview = [(f"sample {n}", format_sample(dataset[n], subject)) for n in indices[:MAX_SHOWN]]
    lengths, padding = find_document_lengths(dataset), find_padding_fraction(dataset)
    evidence: dict[str, Any] = {
        "samples": size,
        "samples_checked": len(indices),
        "shapes": dict(stats.shapes),
        "duplicates": stats.duplicates,
        "non_finite": stats.non_finite,
        "input_scale": stats.float_scale,
        "classes": num_classes,
        "labels": dict(sorted(_label_counts(stats).items())) if has_labels else {},
        "preview": dict(preview),
        "lengths": msgspec.to_builtins(lengths),
        "padding": padding,
        **alignment_evidence,
        **answers.evidence,
    }
    rows = [("samples", f"{size:,}; {len(indices):,} checked, {stats.duplicates} of them duplicates"), *preview]
    rows += [("shapes", "; ".join(f"{s} ({n})" if len(stats.shapes) > 1 else s for s, n in stats.shapes.items()))]
    if stats.float_scale is not None:
        rows.append(("input scale", "mean {:.3g}, standard deviation {:.3g}".format(*stats.float_scale)))
    if evidence["labels"]:
        rows.append(("labels", _format_labels(evidence["labels"], num_classes)))
    if documents := format_documents(lengths, padding):
        rows.append(("documents", ", ".join(documents)))
    rows += answers.rows
    text = "; ".join(t for _, t, _ in reported) or f"no problem in {len(indices):,} samples"
    fix = "; ".join(f for _, _, f in reported if f)
    return Finding(check="data", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def add_sample(stats: SampleStats, index: int, sample: Any) -> None:
    """Add one sample, a pair (inputs, target), to ``stats``."""
    inputs, target = _split_pair(sample)
    tensors = _as_tensors(inputs)
    input_hash = xxhash.xxh3_64_hexdigest(b"".join(_tensor_bytes(t) for t in tensors))
    stats.input_hashes[input_hash] += 1
    stats.target_hashes.setdefault(input_hash, set()).add(
        xxhash.xxh3_64_hexdigest(b"".join(_tensor_bytes(t) for t in _as_tensors(target)))
    )
    for t in tensors:
        if t.is_floating_point():
            finite = t.double()[torch.isfinite(t)]
            if finite.numel():
                stats.float_moments = _merge_moments(stats.float_moments, finite)
    if any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in (*tensors, *_as_tensors(target))):
        stats.non_finite.append(index)
    shapes = (
        ", ".join(_format_shape(t) for t in tensors) + " -> " + ", ".join(_format_shape(t) for t in _as_tensors(target))
    )
    stats.shapes[shapes] += 1
    stats.labels += [t for t in _as_tensors(target) if not t.is_floating_point()]


def _split_pair(sample: Any) -> tuple[Any, Any]:
    """Return (inputs, target) without the starts of documents; the target is None if ``sample`` is not a pair."""
    inputs, target = (
        (sample[0], sample[1]) if isinstance(sample, (tuple, list)) and len(sample) == 2 else (sample, None)
    )
    if isinstance(inputs, dict):
        inputs = {name: value for name, value in inputs.items() if name != DOCUMENT_STARTS}
    return inputs, target


def _as_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested value, with numbers converted to tensors."""
    if isinstance(value, (tuple, list)):
        return [t for inner in value for t in _as_tensors(inner)]
    if isinstance(value, dict):
        return [t for inner in value.values() for t in _as_tensors(inner)]
    return [] if value is None or isinstance(value, str) else [torch.as_tensor(value)]


def _tensor_bytes(t: torch.Tensor) -> bytes:
    data: bytes = t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data


def _format_shape(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"


def _label_counts(stats: SampleStats) -> dict[int, int]:
    if not stats.labels:
        return {}
    return dict(Counter(torch.cat([t.flatten().long() for t in stats.labels]).tolist()))


def _format_labels(counts: dict[int, int], num_classes: int | None) -> str:
    by_count = sorted(counts.items(), key=lambda kv: -kv[1])
    most_frequent = ", ".join(f"{label} ({n})" for label, n in by_count[:MAX_SHOWN])
    suffix = f" of {num_classes} classes" if num_classes else ""
    return f"{min(counts)} to {max(counts)}, {len(counts)}{suffix}; most frequent: {most_frequent}"


def _infer_classes(subject: Subject, dataset: Any) -> int | None:
    """Return the number of classes in the model's output, or None if it is not a classifier."""
    with subject.with_overrides(data={"workers": 0}).trainer() as trainer, torch.no_grad():
        indices = permutation.samples_at(subject.recipe.train.seed, len(dataset), 0, subject.small_sample_count)
        batch = to_device(
            trainer.session.device, tuple(torch.utils.data.default_collate([dataset[n] for n in indices]))
        )
        return infer_num_classes(model_output(trainer, batch), batch[1])


def _merge_moments(moments: tuple[int, float, float], values: torch.Tensor) -> tuple[int, float, float]:
    """Return the moments of both (Chan et al., 1979). Sums of squares would cancel for a mean far from 0."""
    count, mean, squares = moments
    own_count, own_mean = values.numel(), float(values.mean())
    total, delta = count + own_count, own_mean - mean
    own_squares = float((values - own_mean).square().sum())
    return total, mean + delta * own_count / total, squares + own_squares + delta * delta * count * own_count / total


def assess_values(stats: SampleStats, dataset: Any, *, has_unique_target: bool = True) -> list[Note]:
    """Return notes on NaN, Inf, duplicates and, if each input has one right target, inputs with several targets."""
    notes: list[Note] = []
    if stats.non_finite:
        text = f"{len(stats.non_finite)} samples contain NaN or Inf: {format_samples(dataset, stats.non_finite)}"
        notes.append(("fail", text, "remove them, or look for a division by 0 where they are computed"))
    if len(stats.input_hashes) == 1 and len(stats.indices) > 1:
        notes.append(("fail", "all samples have the same inputs", "check how the dataset uses its index"))
    elif stats.duplicates > MAX_DUPLICATE_SHARE * len(stats.indices):
        share = stats.duplicates / len(stats.indices)
        notes.append(("warn", f"{share:.0%} of the samples are duplicates", "remove the duplicates"))
    ambiguous = sum(1 for targets in stats.target_hashes.values() if len(targets) > 1)
    if ambiguous and has_unique_target:
        fix = "keep one target per input: no model can fit both"
        notes.append(("warn", f"{ambiguous} inputs occur with different targets", fix))
    return notes


def assess_scale(stats: SampleStats) -> list[Note]:
    """Return a note on floating-point inputs that are far from mean 0 and standard deviation 1."""
    if stats.float_scale is None:
        return []
    mean, deviation = stats.float_scale
    is_centered = abs(mean) <= MAX_INPUT_SCALE
    if is_centered and (deviation == 0 or 1 / MAX_INPUT_SCALE <= deviation <= MAX_INPUT_SCALE):
        return []  # inputs that are all equal have a note of their own
    text = f"the inputs have mean {mean:.3g} and standard deviation {deviation:.3g}: they are not normalized"
    fix = "subtract the mean and divide by the standard deviation in the dataset, unless the model does it"
    return [("warn", text, fix)]


def assess_labels(stats: SampleStats, num_classes: int | None, subject: Subject) -> list[Note]:
    """Return notes on class labels; other targets have none."""
    counts = _label_counts(stats)
    counts.pop(subject.recipe.objective.ignore_index, None)
    if num_classes is None or not counts:
        return []
    notes: list[Note] = []
    out_of_range = [label for label in counts if not 0 <= label < num_classes]
    if out_of_range:
        text = f"labels range from {min(counts)} to {max(counts)}, but the model has {num_classes} classes"
        fix = f"number the labels from 0 to {num_classes - 1}"
        notes.append(("fail", text, fix if min(counts) >= 0 else f"{fix}, or mask a value with objective.ignore_index"))
    total = sum(counts.values())
    label, top_count = max(counts.items(), key=lambda kv: kv[1])
    if len(counts) == 1:
        fix = "check how labels are read: with a single class there is nothing to learn"
        notes.append(("fail", f"all labels are {label}", fix))
    elif top_count > MAX_CLASS_SHARE * total:
        fix = "use a metric other than accuracy, for which a constant answer already scores high"
        notes.append(("warn", f"{top_count / total:.0%} of the labels are {label}", fix))
    return notes


def _assess_validation_overlap(task: Any, stats: SampleStats) -> list[Note]:
    """Return a warning if validation samples also occur in the training data."""
    if task.validation is None:
        return []
    validation_stats = SampleStats([])
    for i in range(min(len(task.validation), MAX_SAMPLES)):
        add_sample(validation_stats, i, task.validation[i])
    overlap = len(validation_stats.input_hashes.keys() & stats.input_hashes.keys())
    if not overlap:
        return []
    return [("warn", f"{overlap} validation samples are also in the training data", "remove them from one of the two")]


def _assess_alignment(
    subject: Subject, dataset: Any, on_progress: ProgressCallback
) -> tuple[list[Note], dict[str, Any]]:
    """Return notes and evidence on whether targets match their inputs."""
    count = min(len(dataset), CONTIGUOUS_SAMPLES)
    pairs = []
    for i in range(count):
        sample = dataset[i]
        if not (isinstance(sample, (tuple, list)) and len(sample) == 2):
            return [], {}
        inputs, target = _split_pair(sample)
        pairs.append((_as_tensors(inputs), _as_tensors(target)))
        on_progress(MAX_SAMPLES + i + 1, MAX_SAMPLES + CONTIGUOUS_SAMPLES)
    if any(len(a) != 1 or len(b) != 1 for a, b in pairs) or len({(a[0].shape, b[0].shape) for a, b in pairs}) > 1:
        return [], {}
    inputs, targets = (torch.stack([pair[side][0] for pair in pairs]) for side in (0, 1))
    if not inputs.is_floating_point() and inputs.dim() == 2 and inputs.shape == targets.shape:
        shift = label_alignment.find_token_shift(inputs, targets, subject.recipe.objective.ignore_index)
        return assess_shift(shift, has_model_loss=subject.has_model_loss), {"token_shift": shift}
    if subject.recipe.is_text or (targets.dim() > 1 and not targets.is_floating_point()):
        return [], {}
    if not bool(torch.isfinite(inputs.double()).all()):
        return [], {}
    agreement = label_alignment.measure_agreement(inputs, targets if targets.is_floating_point() else targets.long())
    if agreement is None:
        return [], {}
    shares_by_slip = {str(slip): share for slip, share in agreement.shares.items()}
    evidence = {
        "neighbor_agreement": shares_by_slip,
        "chance_agreement": agreement.chance,
        "label_shift_samples": agreement.slip,
    }
    return assess_slip(agreement), evidence


def assess_shift(shift: int | None, *, has_model_loss: bool) -> list[Note]:
    """Return a note if targets are ``shift`` tokens ahead of the inputs instead of one."""
    if shift in (None, 1) or (shift == 0 and has_model_loss):
        return []
    if shift == 0:
        text = "the targets equal the inputs: the model learns to copy"
    else:
        assert shift is not None
        direction = "ahead of" if shift > 0 else "behind"
        text = f"the targets are {abs(shift)} tokens {direction} the inputs; they should be 1 ahead"
    return [("fail", text, "return (tokens[:-1], tokens[1:]) from each sequence of tokens")]


def assess_slip(agreement: label_alignment.Agreement) -> list[Note]:
    """Return a note if labels fit the samples before or after them better than their own."""
    slip = agreement.slip
    if slip in (None, 0):
        return []
    assert slip is not None
    text = (
        f"labels do not belong to their samples: nearest neighbors share {agreement.shares[0]:.0%} of their labels"
        f" (chance: {agreement.chance:.0%}), but {agreement.shares[slip]:.0%} if each sample takes the label"
        f" {label_alignment.format_slip(slip)}"
    )
    return [("fail", text, "check how samples and labels are paired: one list is shifted relative to the other")]


def format_sample(sample: Any, subject: Subject) -> str:
    """Return one sample as a line: text as text, larger tensors as their range."""
    inputs, target = _split_pair(sample)
    is_bytes = subject.recipe.data_kind in ("text", "pairs") and subject.recipe.model.vocab_size == 256
    input_text = ", ".join(_format_tensor(t, is_bytes) for t in _as_tensors(inputs))
    return (
        f"{input_text} -> {', '.join(_format_tensor(t, is_bytes) for t in _as_tensors(target))}"
        if target is not None
        else input_text
    )


def _format_tensor(tensor: torch.Tensor, is_bytes: bool) -> str:
    if tensor.numel() == 1:
        return f"{tensor.item():.4g}" if tensor.is_floating_point() else str(tensor.item())
    if is_bytes and tensor.dim() == 1 and not tensor.is_floating_point():
        return repr(bytes(tensor[:MAX_TEXT_CHARS].tolist()).decode("utf-8", "replace"))
    if not tensor.is_floating_point() and tensor.dim() == 1:
        return f"{_format_ints(tensor[:6].tolist())}{' …' if len(tensor) > 6 else ''}"
    x = tensor.double()
    return f"{_format_shape(tensor)} from {float(x.min()):.3g} to {float(x.max()):.3g}, mean {float(x.mean()):.3g}"


def _format_ints(values: Sequence[int]) -> str:
    return " ".join(map(str, values))
