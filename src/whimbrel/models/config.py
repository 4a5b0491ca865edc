"""What a decoder is made of: one frozen table of numbers and choices for every family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, get_args

from whimbrel.base.errors import ConfigError
from whimbrel.config import not_one_of, to_table

__all__ = ["GPTConfig", "LayerType", "RopeScaling"]

NormKind = Literal["layer", "rms"]
PositionKind = Literal["learned", "rope"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu2"]
Bias = Literal["all", "attention", "qkv", "none"]
QKNorm = Literal["none", "weighted", "unweighted"]
ResidualScale = Literal["none", "attention"]
LayerType = Literal["full_attention", "sliding_attention"]
RopeScalingKind = Literal["linear", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched so that a model reads past the length it was first trained on."""

    kind: RopeScalingKind
    """`linear` divides every frequency by `factor`; `llama3` only the slow ones, with a smooth step between."""
    factor: float
    """How many times longer the stretched context is."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above `original_context_length / low_freq_factor` are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below `original_context_length / high_freq_factor` are left alone."""
    original_context_length: int = 8192
    """llama3: the context length of the first training."""

    def __post_init__(self) -> None:
        _check_choice("rope_scaling.kind", self.kind, get_args(RopeScalingKind))
        if not self.factor >= 1:
            raise ConfigError(f"rope_scaling.factor = {self.factor} must be at least 1")
        _check_positive(self, _POSITIVE_ROPE, "rope_scaling.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope_scaling.high_freq_factor = {self.high_freq_factor} must be greater than "
                f"rope_scaling.low_freq_factor = {self.low_freq_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a decoder. The defaults are OpenAI's GPT-2 (124M); `preset(name)` gives the other families."""

    context_length: int = 1024
    """The longest sequence the model reads at once, in tokens."""
    vocab_size: int = 50257
    """How many token ids there are."""
    num_layers: int = 12
    """How many blocks are stacked."""
    embd_size: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Query heads of each attention."""
    num_kv_heads: int | None = None
    """Key and value heads, a divisor of `num_heads` (grouped-query attention); `num_heads` when not given."""
    head_size: int | None = None
    """Width of one head; `embd_size / num_heads` when not given."""
    mlp_size: int | None = None
    """Hidden width of the MLP; `4 * embd_size` when not given."""
    norm: NormKind = "layer"
    """LayerNorm (`layer`) or RMSNorm (`rms`)."""
    norm_eps: float = 1e-5
    """Added to the variance before its root is taken."""
    norm_affine: bool = True
    """Whether norms carry learned weights."""
    position: PositionKind = "learned"
    """A learned vector per position (`learned`) or rotated queries and keys (`rope`)."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies."""
    activation: Activation = "gelu_tanh"
    """Non-linearity of the MLP: `gelu` is exact, `gelu_tanh` is GPT-2's, `relu2` is the squared ReLU."""
    gated_mlp: bool = False
    """Whether the MLP multiplies its activation by a second projection, as in SwiGLU."""
    bias: Bias = "all"
    """Which linears have a bias: `all` (and LayerNorm), those of `attention`, only `qkv`, or `none`."""
    qk_norm: QKNorm = "none"
    """RMSNorm of every query and key head before rotation: `weighted` as in Qwen3, or `unweighted`."""
    sliding_window: int | None = None
    """How many tokens, itself included, a token of a sliding layer sees."""
    layer_types: tuple[LayerType, ...] | None = None
    """`full_attention` or `sliding_attention` for each layer; all slide when only `sliding_window` is given."""
    tied_head: bool = True
    """Whether the head shares the weight of the token embedding."""
    logit_softcap: float | None = None
    """Logits become `cap * tanh(logits / cap)`."""
    residual_scale: ResidualScale = "none"
    """`attention` multiplies the attention branch by `1 / sqrt(2 * num_layers)` in the forward pass."""
    embedding_skip: bool = False
    """Norm the embedding `x0`, and open each block with a learned mix `a * x + b * x0` (a = 1, b = 0 at first)."""
    init_std: float = 0.02
    """Standard deviation of the normal distribution that linears are drawn from."""
    embd_init_std: float = 0.02
    """Standard deviation of the normal distribution that embeddings are drawn from."""
    zero_init_projections: bool = False
    """Start the projections that close both branches at zero, so that each block starts as the identity."""
    zero_init_head: bool = False
    """Start an untied head at zero, so that the first prediction is uniform."""
    vocab_multiple: int = 128
    """The embedding is stored with its rows rounded up to a multiple of this; the extra rows never show outside."""

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            _check_choice(name, getattr(self, name), get_args(kind))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
            limit = MAX_LAYERS if name == "num_layers" else MAX_COUNT
            if value is not None and value > limit:
                raise ConfigError(f"expected {name} of at most {limit:,}, got {value}")
        _check_positive(self, _POSITIVE)
        for name in ("init_std", "embd_init_std"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 0")
        if self.head_size is None and self.embd_size % self.num_heads:
            raise ConfigError(
                f"embd_size = {self.embd_size} is not a multiple of num_heads = {self.num_heads}: "
                "change one of them or give head_size"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.kv_heads}")
        self._check_positions()
        self._check_layer_types()
        if self.zero_init_head and self.tied_head:
            raise ConfigError("zero_init_head needs an untied head: set tied_head = false")

    def _check_positions(self) -> None:
        if self.position == "rope" and self.head_width % 2:
            raise ConfigError(f"position = 'rope' needs an even head size, got {self.head_width}")
        if self.position != "rope" and self.rope_scaling is not None:
            raise ConfigError(f"rope_scaling needs position = 'rope', got position = '{self.position}'")

    def _check_layer_types(self) -> None:
        if self.layer_types is None:
            return
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(f"layer_types names {len(self.layer_types)} layers but num_layers = {self.num_layers}")
        for kind in self.layer_types:
            _check_choice("layer_types", kind, get_args(LayerType))
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ConfigError("layer_types has sliding_attention: give sliding_window")

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.embd_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP."""
        return 4 * self.embd_size if self.mlp_size is None else self.mlp_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the stored embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None sees everything."""
        if self.layer_types is None:
            return (self.sliding_window,) * self.num_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @property
    def matrix_parameters(self) -> int:
        """Parameters of embeddings and linears without padding: nearly all, known before building."""
        attention = 2 * (self.num_heads + self.kv_heads) * self.head_width
        mlp = (3 if self.gated_mlp else 2) * self.mlp_width
        looked_up = self.vocab_size * (1 if self.tied_head else 2)
        looked_up += self.context_length if self.position == "learned" else 0
        return self.embd_size * (looked_up + self.num_layers * (attention + mlp))

    def to_json_string(self) -> str:
        """The settings as JSON; those that are None are left out."""
        return json.dumps(to_table(self), indent=2) + "\n"


MAX_LAYERS = 10_000
MAX_COUNT = 2**31 - 1
"""What a size may be at most: beyond it a file is damaged or hostile, and building the model would hang."""

_CHOICES = {
    "norm": NormKind,
    "position": PositionKind,
    "activation": Activation,
    "bias": Bias,
    "qk_norm": QKNorm,
    "residual_scale": ResidualScale,
}
_COUNTS = (
    "context_length",
    "vocab_size",
    "num_layers",
    "embd_size",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "mlp_size",
    "sliding_window",
    "vocab_multiple",
)
_POSITIVE = ("norm_eps", "rope_theta", "logit_softcap")
_POSITIVE_ROPE = ("low_freq_factor", "high_freq_factor", "original_context_length")


def _check_positive(settings: object, names: tuple[str, ...], section: str = "") -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:  # so written, it refuses a NaN too
            raise ConfigError(f"{section}{name} = {value} must be greater than 0")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(not_one_of(name, value, choices))
