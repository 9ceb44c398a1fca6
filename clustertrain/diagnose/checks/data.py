"""A look at the data itself: some samples as the model gets them, labels, duplicates, values that are not finite, and
whether targets belong to their inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import xxhash

from clustertrain.diagnose.checks import label_alignment
from clustertrain.diagnose.child_output import Tell
from clustertrain.diagnose.registry import Finding, Verdict, worst
from clustertrain.diagnose.subject import Subject, classes_of, on, output_of
from clustertrain.train.data import permutation
from clustertrain.train.data.describe import lengths_of, padding_of, words_of_documents
from clustertrain.train.data.sample_checks import listed

SAMPLES = 1024  # looked at; in the run's order, so from all over the data
IN_A_ROW = 1024  # neighbours in the data set, whose labels may have slipped
SHOWN = 4
DUPLICATES = 0.1  # of the samples
ONE_CLASS = 0.9  # of the labels
TEXT = 40  # characters of a sample

Note = tuple[Verdict, str, str]


@dataclass
class Seen:
    """What the samples were. ``numbers`` are theirs in the data set."""

    numbers: list[int]
    hashes: Counter[str] = field(default_factory=Counter)
    not_finite: list[int] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)
    labels: list[torch.Tensor] = field(default_factory=list)
    targets_of: dict[str, set[str]] = field(default_factory=dict)

    @property
    def duplicates(self) -> int:
        return sum(n - 1 for n in self.hashes.values())


def check(subject: Subject, tell: Tell) -> Finding:
    what = subject.task()
    dataset = what.dataset
    size = len(dataset)
    if size < 1:
        return Finding(check="data", verdict="fail", text="the data set is empty", fix="give it samples")
    numbers = permutation.samples(subject.recipe.train.seed, size, 0, min(size, SAMPLES))
    seen = Seen(numbers)
    for i, number in enumerate(numbers):
        look_at(seen, number, dataset[number])
        tell(i + 1, len(numbers) + IN_A_ROW)
    classes = _classes(subject, dataset)
    labelled = subject.recipe.objective_kind != "nt-xent"  # its targets only number the samples
    one_answer = labelled and not subject.recipe.is_text  # the same words may go on in several ways
    notes = [
        *of_values(seen, dataset, one_answer=one_answer),
        *of_labels(seen, classes, subject),
        *_of_validation(what, seen),
    ]
    shifts, evidence_of_pairs = _of_pairs(subject, dataset, tell) if labelled else ([], {})
    notes += shifts
    verdict = worst(v for v, _, _ in notes)
    told = [n for n in notes if n[0] == verdict]
    shown = [(f"sample {n}", words_of(dataset[n], subject)) for n in numbers[:SHOWN]]
    lengths, padding = lengths_of(dataset), padding_of(dataset)
    evidence: dict[str, Any] = {
        "samples": size,
        "looked_at": len(numbers),
        "shapes": dict(seen.shapes),
        "duplicates": seen.duplicates,
        "not_finite": seen.not_finite,
        "classes": classes,
        "labels": dict(sorted(_histogram(seen).items())) if labelled else {},
        "shown": dict(shown),
        "lengths": msgspec.to_builtins(lengths),
        "padding": padding,
        **evidence_of_pairs,
    }
    rows = [("samples", f"{size:,}, {len(numbers):,} looked at, {seen.duplicates} of them duplicates"), *shown]
    rows += [("shapes", "; ".join(f"{s} ({n})" if len(seen.shapes) > 1 else s for s, n in seen.shapes.items()))]
    if evidence["labels"]:
        rows.append(("labels", _labels_in_words(evidence["labels"], classes)))
    if documents := words_of_documents(lengths, padding):
        rows.append(("documents", ", ".join(documents)))
    text = "; ".join(t for _, t, _ in told) or f"{len(numbers):,} samples are sound"
    fix = "; ".join(f for _, _, f in told if f)
    return Finding(check="data", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows)


def look_at(seen: Seen, number: int, sample: Any) -> None:
    """Add one sample, a pair (inputs, target)."""
    inputs, target = _pair(sample)
    found = _all(inputs)
    key = xxhash.xxh3_64_hexdigest(b"".join(_bytes(t) for t in found))
    seen.hashes[key] += 1
    seen.targets_of.setdefault(key, set()).add(xxhash.xxh3_64_hexdigest(b"".join(_bytes(t) for t in _all(target))))
    if any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in (*found, *_all(target))):
        seen.not_finite.append(number)
    shapes = ", ".join(_shape(t) for t in found) + " -> " + ", ".join(_shape(t) for t in _all(target))
    seen.shapes[shapes] += 1
    seen.labels += [t for t in _all(target) if not t.is_floating_point()]


def _pair(sample: Any) -> tuple[Any, Any]:
    """(inputs, target); None for the target of what is no pair."""
    return (sample[0], sample[1]) if isinstance(sample, (tuple, list)) and len(sample) == 2 else (sample, None)


def _all(part: Any) -> list[torch.Tensor]:
    """Numbers too, as tensors."""
    if isinstance(part, (tuple, list)):
        return [t for inner in part for t in _all(inner)]
    if isinstance(part, dict):
        return [t for inner in part.values() for t in _all(inner)]
    return [] if part is None or isinstance(part, str) else [torch.as_tensor(part)]


def _bytes(t: torch.Tensor) -> bytes:
    data: bytes = t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data


def _shape(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"


def _histogram(seen: Seen) -> dict[int, int]:
    if not seen.labels:
        return {}
    return dict(Counter(torch.cat([t.flatten().long() for t in seen.labels]).tolist()))


def _labels_in_words(found: dict[int, int], classes: int | None) -> str:
    most = sorted(found.items(), key=lambda kv: -kv[1])
    often = ", ".join(f"{label} ({n})" for label, n in most[:SHOWN])
    of = f" of {classes} classes" if classes else ""
    return f"{min(found)} to {max(found)}, {len(found)}{of}; most often {often}"


def _classes(subject: Subject, dataset: Any) -> int | None:
    """That the model tells apart; None where that is not known."""
    with subject.changed(data={"workers": 0}).trainer() as t, torch.no_grad():
        numbers = permutation.samples(subject.recipe.train.seed, len(dataset), 0, subject.eight)
        batch = on(t.session.device, tuple(torch.utils.data.default_collate([dataset[n] for n in numbers])))
        return classes_of(output_of(t, batch), batch[1])


def of_values(seen: Seen, dataset: Any, *, one_answer: bool = True) -> list[Note]:
    """``one_answer``: inputs have one right target."""
    notes: list[Note] = []
    if seen.not_finite:
        text = f"{len(seen.not_finite)} samples are not finite: {listed(dataset, seen.not_finite)}"
        notes.append(("fail", text, "remove them, or see what divides by 0 when they are made"))
    if len(seen.hashes) == 1 and len(seen.numbers) > 1:
        notes.append(("fail", "all samples have the same inputs", "see what the data set does with its index"))
    elif seen.duplicates > DUPLICATES * len(seen.numbers):
        share = seen.duplicates / len(seen.numbers)
        notes.append(("warn", f"{share:.0%} of the samples are there before", "remove the duplicates"))
    torn = sum(1 for targets in seen.targets_of.values() if len(targets) > 1)
    if torn and one_answer:
        notes.append(("warn", f"{torn} inputs come with different targets", "no model can learn both: remove one"))
    return notes


def of_labels(seen: Seen, classes: int | None, subject: Subject) -> list[Note]:
    """Of classes; nothing of other targets."""
    found = _histogram(seen)
    found.pop(subject.recipe.objective.ignore_index, None)
    if classes is None or not found:
        return []
    notes: list[Note] = []
    out = [label for label in found if not 0 <= label < classes]
    if out:
        text = f"labels run from {min(found)} to {max(found)}, and the model tells {classes} classes apart"
        fix = f"number them from 0 to {classes - 1}"
        notes.append(
            ("fail", text, fix if min(found) >= 0 else f"{fix}; objective.ignore_index names one not to count")
        )
    total = sum(found.values())
    label, most = max(found.items(), key=lambda kv: kv[1])
    if len(found) == 1:
        notes.append(("fail", f"all labels are {label}", "there is nothing to learn: see how they are read"))
    elif most > ONE_CLASS * total:
        notes.append(
            ("warn", f"{most / total:.0%} of the labels are {label}", "accuracy says little: choose another metric")
        )
    return notes


def _of_validation(what: Any, seen: Seen) -> list[Note]:
    """Whether what is kept apart is learned as well."""
    if what.validation is None:
        return []
    held = Seen([])
    for i in range(min(len(what.validation), SAMPLES)):
        look_at(held, i, what.validation[i])
    both = len(held.hashes.keys() & seen.hashes.keys())
    if not both:
        return []
    return [("warn", f"{both} samples of the validation data are also learned from", "remove them from one of the two")]


def _of_pairs(subject: Subject, dataset: Any, tell: Tell) -> tuple[list[Note], dict[str, Any]]:
    """Whether targets belong to their inputs."""
    count = min(len(dataset), IN_A_ROW)
    pairs = []
    for i in range(count):
        sample = dataset[i]
        if not (isinstance(sample, (tuple, list)) and len(sample) == 2):
            return [], {}
        pairs.append((_all(sample[0]), _all(sample[1])))
        tell(SAMPLES + i + 1, SAMPLES + IN_A_ROW)
    if any(len(a) != 1 or len(b) != 1 for a, b in pairs) or len({(a[0].shape, b[0].shape) for a, b in pairs}) > 1:
        return [], {}
    inputs, targets = (torch.stack([pair[side][0] for pair in pairs]) for side in (0, 1))
    if not inputs.is_floating_point() and inputs.dim() == 2 and inputs.shape == targets.shape:
        shift = label_alignment.token_shift(inputs, targets, subject.recipe.objective.ignore_index)
        return of_shift(shift, own_loss=subject.own_loss), {"token_shift": shift}
    if subject.recipe.is_text or (targets.dim() > 1 and not targets.is_floating_point()):
        return [], {}
    if not bool(torch.isfinite(inputs.double()).all()):
        return [], {}
    found = label_alignment.agreement(inputs, targets if targets.is_floating_point() else targets.long())
    if found is None:
        return [], {}
    named = {str(slip): share for slip, share in found.shares.items()}
    evidence = {"neighbours_agree": named, "chance": found.chance, "label_slip": found.slip}
    return of_slip(found), evidence


def of_shift(shift: int | None, *, own_loss: bool) -> list[Note]:
    """Of tokens whose targets are ``shift`` places ahead of the inputs."""
    if shift in (None, 1) or (shift == 0 and own_loss):
        return []
    if shift == 0:
        text = "the targets are the inputs themselves: the model learns to copy"
    else:
        assert shift is not None
        where = "ahead of" if shift > 0 else "behind"
        text = f"the targets are {abs(shift)} tokens {where} the inputs, and should be 1 ahead"
    return [("fail", text, "return (tokens[:-1], tokens[1:]) of each stretch of tokens")]


def of_slip(found: label_alignment.Agreement) -> list[Note]:
    slip = found.slip
    if slip in (None, 0):
        return []
    assert slip is not None
    text = (
        f"labels do not belong to their samples: nearest neighbours share {found.shares[0]:.0%} of their labels (by "
        f"chance {found.chance:.0%}), and {found.shares[slip]:.0%} where each takes the label "
        f"{label_alignment.slip_words(slip)}"
    )
    return [("fail", text, "see how samples and labels are put together: one list has slipped against the other")]


def words_of(sample: Any, subject: Subject) -> str:
    """One sample in a line: text as text, numbers by their range."""
    inputs, target = _pair(sample)
    of_bytes = subject.recipe.data_kind in ("text", "pairs") and subject.recipe.model.vocab_size == 256
    words = ", ".join(_words(t, of_bytes) for t in _all(inputs))
    return f"{words} -> {', '.join(_words(t, of_bytes) for t in _all(target))}" if target is not None else words


def _words(t: torch.Tensor, of_bytes: bool) -> str:
    if t.numel() == 1:
        return f"{t.item():.4g}" if t.is_floating_point() else str(t.item())
    if of_bytes and t.dim() == 1 and not t.is_floating_point():
        return repr(bytes(t[:TEXT].tolist()).decode("utf-8", "replace"))
    if not t.is_floating_point() and t.dim() == 1:
        return f"{_numbers(t[:6].tolist())}{' …' if len(t) > 6 else ''}"
    x = t.double()
    return f"{_shape(t)} from {float(x.min()):.3g} to {float(x.max()):.3g}, mean {float(x.mean()):.3g}"


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))
