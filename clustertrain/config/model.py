"""The ``[model]`` table and its sub-tables: architecture and sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from clustertrain.config.checks.ranges import check_entry, check_positive, check_range
from clustertrain.config.data import DataKind
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.config.parsing.presets import PRESETS

ModelKind = Literal["decoder", "convnet", "two-tower"]
Activation = Literal["silu", "gelu-tanh"]
RopeScalingKind = Literal["none", "linear", "llama3"]
# "auto" stands for the first.
DATA_KINDS_BY_MODEL: Mapping[ModelKind, tuple[DataKind, ...]] = {
    "decoder": ("text", "tokens", "chat", "custom"),
    "convnet": ("images", "custom"),
    "two-tower": ("pairs", "custom"),
}

MAX_STAGES = 14  # halve 16,384 pixels to 1


class ConvnetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[model.convnet]`` table: a residual network for images (He et al., arXiv 1512.03385) with group norms."""

    classes: int = 10
    """Number of classes: the outputs of the last layer."""
    channels: int = 3
    """Channels of the input images."""
    width: int = 32
    """Channels of the first stage. Each further stage doubles the width and halves the height and the width of the
    image."""
    blocks: tuple[int, ...] = (2, 2, 2)
    """Residual blocks in each stage; its length is the number of stages (at most 14)."""
    groups: int = 8
    """Channel groups of each group norm. Must divide ``width``."""

    def __post_init__(self) -> None:
        for name in ("classes", "channels", "width", "groups"):
            check_positive(name, getattr(self, name))
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"blocks = {list(self.blocks)}: each stage needs at least one block")
        if len(self.blocks) > MAX_STAGES:
            raise ValueError(
                f"blocks: {len(self.blocks)} stages, at most {MAX_STAGES}; each halves the image and doubles the width"
            )
        if self.width % self.groups:
            raise ValueError(f"width = {self.width} is not divisible by groups = {self.groups}")

    def block_shapes(self) -> list[tuple[int, int, int]]:
        """Return (input channels, output channels, stride) of each block."""
        shapes: list[tuple[int, int, int]] = []
        in_channels = self.width
        for stage, count in enumerate(self.blocks):
            width = self.width << stage
            for i in range(count):
                shapes.append((in_channels, width, 2 if stage and i == 0 else 1))
                in_channels = width
        return shapes

    def parameters(self) -> int:
        """Return the number of parameters, counted from the shapes."""
        count = 9 * self.channels * self.width + 2 * self.width
        for in_channels, width, stride in self.block_shapes():
            count += 9 * (in_channels + width) * width + 4 * width
            if stride > 1 or in_channels != width:
                count += in_channels * width + 2 * width
        return count + (self.block_shapes()[-1][1] + 1) * self.classes


class TwoTowerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[model.two_tower]`` table: settings that two encoders share. Both have the sizes in ``[model]``."""

    embedding: int = 64
    """Dimensions of the embedding space that both encoders share."""
    temperature: float = 0.5
    """Temperature of the similarities; the initial one if ``learn_temperature``."""
    learn_temperature: bool = True
    """Train the temperature as a parameter."""

    def __post_init__(self) -> None:
        check_positive("embedding", self.embedding)
        check_range("temperature", self.temperature, 0.01, 10.0)

    @property
    def log_scale(self) -> float:
        """Logarithm of the initial factor of the similarities."""
        return -math.log(self.temperature)


class RopeScalingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[model.rope_scaling]`` table: rescaled rotary frequencies of a model with an extended context."""

    kind: RopeScalingKind = "none"
    """``"linear"``: all frequencies divided by ``factor`` (Chen et al., arXiv 2306.15595). ``"llama3"``: only low
    frequencies, as in Llama 3.1."""
    factor: float = 1.0
    """Factor by which the context was extended."""
    low_freq_factor: float = 1.0
    """``llama3``: wavelengths above ``original_max_seq_len`` / this are divided by ``factor``."""
    high_freq_factor: float = 4.0
    """``llama3``: wavelengths below ``original_max_seq_len`` / this stay; those in between are interpolated."""
    original_max_seq_len: int = 8192
    """``llama3``: context length before the extension, in tokens."""

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"):
            check_positive(name, getattr(self, name))
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor:g} must be less than high_freq_factor = "
                f"{self.high_freq_factor:g}"
            )


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[model]`` table. The decoder is Llama-style: RMSNorm, RoPE, SwiGLU, grouped-query attention.

    Each encoder of a two-tower model has the same architecture and sizes. A key that does not belong to the kind in use
    is refused.
    """

    kind: ModelKind = "decoder"
    """Built-in architecture. ``"decoder"``: a causal transformer. ``"convnet"``: a residual network for images.
    ``"two-tower"``: two encoders trained with a contrastive loss. Unused with ``entry``."""
    preset: str = ""
    """Name of a published size, for example ``"llama3.1-8b"``, that sets the sizes below, ``data.seq_len`` and
    ``train.global_batch``; keys given in the recipe win. Empty: no preset. Not for convnets and entries."""
    init: str = ""
    """Weights to start from. Empty: random weights. For the decoder, a folder or ``.safetensors`` file in the format of
    Hugging Face transformers, whose ``config.json`` sets the sizes below; Llama, Mistral, Qwen2, Qwen3 and Gemma models
    are supported. For another model, safetensors with the names of its ``state_dict()``. For every model, a checkpoint:
    RUN (the newest one), ``"RUN@best"``, ``"RUN@STEP"`` or its folder, which sets the sizes too."""
    init_parts: dict[str, str] = {}
    """Weights of parts of an entry's model, by module, such as ``{tower = "weights/tower"}``: a checkpoint, named as in
    ``init``, or safetensors with the tensor names of that module or, for a built-in decoder, of Hugging Face. Other
    modules are initialized as usual."""
    entry: str = ""
    """Function that builds your model, as ``"package.module:function"``. It is called with ``args`` and returns the
    ``torch.nn.Module`` to train. Empty: the built-in model of ``kind``."""
    args: dict[str, Any] = {}
    """Keyword arguments for ``entry``. Unused without an entry."""
    convnet: ConvnetSpec = ConvnetSpec()
    """Sizes of the convnet. Unused by the other kinds."""
    two_tower: TwoTowerSpec = TwoTowerSpec()
    """Settings of the two-tower model. Unused by the other kinds."""
    vocab_size: int = 256
    """Entries of the token embedding. The default is one per byte."""
    dim: int = 128
    """Width of the residual stream. Must be a multiple of ``heads``, with an even quotient."""
    layers: int = 4
    """Number of transformer blocks (per encoder of a two-tower model)."""
    heads: int = 4
    """Attention heads for queries."""
    kv_heads: int = 2
    """Attention heads for keys and values. Must divide ``heads``; equal to ``heads``: multi-head attention."""
    head_dim: int = 0
    """Width of an attention head. Must be even. 0: ``dim / heads``."""
    ffn_dim: int = 0
    """Hidden width of the feed-forward layer. 0: 8/3 of ``dim``, rounded up to a multiple of 64."""
    max_seq_len: int = 0
    """Longest sequence, in tokens; longer samples are refused. 0: no limit, since rotary embeddings have none. An entry
    states its limit itself."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding's frequencies."""
    rope_scaling: RopeScalingSpec = RopeScalingSpec()
    """Rescaling of these frequencies."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""
    norm_offset: bool = False
    """RMS norms multiply by 1 + weight, as in Gemma."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias, as in Qwen2."""
    qk_norm: bool = False
    """Each head's queries and keys pass through an RMS norm, as in Qwen3."""
    activation: Activation = "silu"
    """Activation of the gate in the feed-forward layer: ``"silu"`` (SwiGLU), or ``"gelu-tanh"`` as in Gemma."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of ``dim``, as in Gemma."""
    tie_embeddings: bool = False
    """Share one matrix between the token embedding and the output layer. Decoder only."""
    dropout: float = 0.0
    """Dropout probability on residual branches and embeddings. 0: none."""

    def __post_init__(self) -> None:
        self._check_names()
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "rope_theta", "norm_eps"):
            check_positive(name, getattr(self, name))
        if self.head_dim < 0:
            raise ValueError(f"head_dim = {self.head_dim}: must be 0 (dim / heads) or more")
        if self.dim % self.heads and not self.head_dim:
            raise ValueError(f"dim = {self.dim} is not divisible by heads = {self.heads}")
        if self.head_size % 2:
            name = "head_dim" if self.head_dim else "dim / heads"
            raise ValueError(f"{name} = {self.head_size} is odd: rotary embeddings need an even head size")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not divisible by kv_heads = {self.kv_heads}")
        if self.ffn_dim < 0:
            raise ValueError(f"ffn_dim = {self.ffn_dim}: must be 0 (from dim) or more")
        if self.max_seq_len < 0:
            raise ValueError(f"max_seq_len = {self.max_seq_len}: must be 0 (no limit) or more")
        check_range("dropout", self.dropout, 0.0, 0.9)

    def _check_names(self) -> None:
        if self.preset and self.preset not in PRESETS:
            raise ValueError(f"preset = {self.preset!r}: {did_you_mean(self.preset, list(PRESETS))}")
        if self.preset and (self.entry or self.kind == "convnet"):
            raise ValueError(f"preset = {self.preset!r} is a transformer: remove preset")
        if self.init_parts and not self.entry:
            raise ValueError("init_parts names modules of an entry's model: set entry, or init for the whole model")
        if self.init_parts and self.init:
            raise ValueError(f"init_parts and init = {self.init!r} are mutually exclusive: init has all weights")
        if "" in self.init_parts or "" in self.init_parts.values():
            raise ValueError('init_parts: needs names of modules and their files, such as { tower = "weights/tower" }')
        if self.entry:
            check_entry(self.entry)
        if self.entry and self.kind != "decoder":
            raise ValueError(
                f"entry and kind = {self.kind!r} are mutually exclusive: the entry builds the model, remove kind"
            )
        if self.args and not self.entry:
            raise ValueError("args needs an entry")

    @property
    def weight_files(self) -> dict[str, str]:
        """The files or folders of weights to start from, by the name of the module that they fill; "" is the model."""
        return {"": self.init} if self.init else dict(self.init_parts)

    @property
    def is_decoder(self) -> bool:
        return self.kind == "decoder" and not self.entry

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_dim or -(-(8 * self.dim // 3) // 64) * 64

    @property
    def gated(self) -> bool:
        return True  # SwiGLU

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.dim // self.heads

    @property
    def attention_dim(self) -> int:
        """Width of all heads' queries together."""
        return self.heads * self.head_size

    @property
    def kv_dim(self) -> int:
        """Width of all heads' keys together."""
        return self.kv_heads * self.head_size

    def block_vectors(self) -> dict[str, int]:
        """Return the number of elements of each norm and bias of one layer, by name."""
        vectors = {"attention_norm": self.dim, "ffn_norm": self.dim}
        if self.qkv_bias:
            vectors |= {"attention.q": self.attention_dim, "attention.k": self.kv_dim, "attention.v": self.kv_dim}
        if self.qk_norm:
            vectors |= dict.fromkeys(("attention.q_norm", "attention.k_norm"), self.head_size)
        return vectors

    def block_vector_elements(self) -> int:
        """Return the number of elements of all norms and biases of one layer.

        The estimates count them as replicated: tensor parallelism splits only the biases, which are some kilobytes.
        """
        biases = (self.attention_dim + 2 * self.kv_dim) * self.qkv_bias
        return 2 * self.dim + biases + 2 * self.head_size * self.qk_norm

    def block_parameters(self) -> int:
        """Return the number of parameters of one layer: attention, feed-forward, norms and biases."""
        attention = 2 * self.dim * (self.attention_dim + self.kv_dim)
        return attention + 3 * self.dim * self.hidden + self.block_vector_elements()

    def parameters(self) -> int:
        """Return the number of parameters of the built-in model, counted from the shapes."""
        if self.kind == "convnet":
            return self.convnet.parameters()
        if self.kind == "two-tower":
            tower = self.vocab_size * self.dim + self.layers * self.block_parameters() + self.dim
            return 2 * (tower + self.dim * self.two_tower.embedding) + self.two_tower.learn_temperature
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.layers * self.block_parameters() + embeddings + self.dim
