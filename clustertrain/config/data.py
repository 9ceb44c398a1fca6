"""The ``[data]`` table: training data, how it is read, and validation data."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from clustertrain.config.checks.ranges import check_entry, check_positive, check_range

MAX_AUTO_WORKERS = 8  # more workers of one rank rarely read faster
DIGITS = "digits"
# Values of data.path that are not files, by kind; an empty path means the first.
BUILT_IN_DATASETS = {"images": ("shapes", DIGITS), "pairs": ("stdlib", DIGITS), "text": ("stdlib",)}
DIGIT_HALF_PIXELS = 32  # pixels in half a digit = tokens per passage of a pair

DataKind = Literal["auto", "text", "pairs", "images", "tokens", "chat", "custom"]
AttentionScope = Literal["sample", "document"]


class AugmentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[data.augment]`` table: random changes of training images, independent of the number of ranks."""

    crop: int = 0
    """Pixels of padding on each side before a random crop back to the original size. 0: none."""
    flip: bool = False
    """Mirror each image horizontally with probability 1/2."""
    color: float = 0.0
    """Largest relative change of brightness, contrast and saturation. 0: none."""
    mixup: float = 0.0
    """Alpha of mixup (arXiv 1710.09412), which blends each image with another one. 0: none."""

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise ValueError(f"crop = {self.crop}: must be 0 or more pixels")
        check_range("color", self.color, 0.0, 1.0)
        check_range("mixup", self.mixup, 0.0, 10.0)

    @property
    def is_enabled(self) -> bool:
        return self != AugmentSpec()


class DataSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[data]`` table: text, pairs of text passages, tokens, chats, images with classes, or your dataset."""

    kind: DataKind = "auto"
    """Kind of data: ``"text"`` (bytes of files), ``"pairs"`` (neighboring passages), ``"tokens"`` (a folder of token
    shards), ``"chat"`` (conversations, of which only the answers are learned), ``"images"`` (with classes) or
    ``"custom"`` (the dataset that ``entry`` returns). ``"auto"``: text for the decoder and for a model entry, images
    for convnets, pairs for two-tower models."""
    path: str = ""
    """Source of the data. Text and pairs: a file, a folder searched recursively for ``pattern``, or ``"stdlib"`` (the
    Python standard library). Pairs also: ``"digits"``, the halves of scikit-learn's images. Tokens: a folder of
    shards. Chat: a file of JSON lines, a Parquet file, or a folder of ``.jsonl`` and ``.parquet`` files. Text, pairs,
    tokens and chat also: a data set that Hugging Face's ``datasets`` saved with ``save_to_disk``. Images: an ``.npz``
    file, a folder with one folder per class, ``"shapes"`` (drawn) or ``"digits"``. An entry receives it unchanged as
    its argument ``path``. Empty: ``"stdlib"`` or ``"shapes"``."""
    pattern: str = "*.py"
    """Glob pattern of the files in a folder of text. Unused for other kinds."""
    entry: str = ""
    """Function that returns your map-style dataset or a stream of samples, as ``"package.module:function"``, called
    with ``args``. Required by ``kind = "custom"``, unused otherwise."""
    args: dict[str, Any] = {}
    """Keyword arguments for ``entry``. Unused without an entry."""
    tokenizer: str = ""
    """Chat only, required. The tokenizer: a ``tokenizer.json`` of the ``tokenizers`` library, or a folder with it and
    with ``tokenizer_config.json``, which has the chat template and the special tokens."""
    chat_template: str = ""
    """Chat only. File with a chat template in Jinja, instead of the tokenizer's own. Empty: the tokenizer's own."""
    seq_len: int = 256
    """Tokens per sample; per passage for pairs. A longer conversation is cut at its end. Unused for images."""
    pack: bool = False
    """Tokens and chat only. Put whole documents or conversations into each sample and pad the rest. ``false``: cut
    samples from the stream of all tokens; for chat, one conversation per sample."""
    attention: AttentionScope = "sample"
    """Which tokens of a packed sample a token attends to. ``"sample"``: all earlier ones. ``"document"``: the earlier
    ones of its own document or conversation, with rotary positions that start at 0 in each. Needs ``pack``; a dataset
    of ``entry`` says where its documents start."""
    max_bytes: int = 64 * 1024 * 1024
    """Most bytes to read of text and pairs. Unused for other kinds."""
    image_size: int = 32
    """Height and width in pixels. Images in an ``.npz`` file and ``"digits"`` keep their size."""
    augment: AugmentSpec = AugmentSpec()
    """Augmentation of training images. Unused for other kinds."""
    validation: float = 0.0
    """Fraction of the samples held out for evaluation, the same one for every seed. 0: none."""
    validation_path: str = ""
    """Separate validation data of the same kind, instead of ``validation``. Empty: none."""
    samples: int = 0
    """Training samples in an epoch, for the keys in epochs. 0: counted at submission."""
    workers: int = -1
    """Processes per rank that read ahead. 0: none, the rank reads the data itself. -1: on GPUs one per core of the rank
    except one, at most 8; none on CPUs."""
    prefetch: int = 2
    """Micro-batches that each worker holds ready. Unused without workers."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "max_bytes", "image_size", "prefetch"):
            check_positive(name, getattr(self, name))
        if self.samples < 0:
            raise ValueError(f"samples = {self.samples}: must be 0 (counted at submission) or more")
        if self.workers < -1:
            raise ValueError(f"workers = {self.workers}: must be 0 (none) or more, or -1 (as many as the cores allow)")
        check_range("validation", self.validation, 0.0, 0.9)
        if self.validation and self.validation_path:
            raise ValueError("validation and validation_path are mutually exclusive: remove one")
        if self.entry:
            check_entry(self.entry)
        if self.kind == "chat" and not (self.path and self.tokenizer):
            raise ValueError(
                "kind = 'chat' needs path, the file or folder of the conversations, and tokenizer, the tokenizer.json "
                "or the folder with it"
            )
        if (self.kind == "custom") != bool(self.entry):
            raise ValueError("kind = 'custom' requires entry, and entry requires kind = 'custom'")
        if self.args and not self.entry:
            raise ValueError("args needs an entry")

    @property
    def description(self) -> str:
        """The key and value that identify the data in messages."""
        return f"data.entry = {self.entry!r}" if self.entry else f"data.path = {self.path!r}"

    @property
    def has_validation(self) -> bool:
        return bool(self.validation or self.validation_path)
