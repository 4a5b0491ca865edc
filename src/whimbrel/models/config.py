"""`GPTConfig`: the architecture of a decoder, of any family."""

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
    """Scaling of rotary frequencies for contexts longer than in the original training."""

    kind: RopeScalingKind
    """`linear` divides every frequency by `factor`; `llama3` only low frequencies, with a smooth transition."""
    factor: float
    """Ratio of the new context length to the original."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above `original_context_length / low_freq_factor` are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below `original_context_length / high_freq_factor` are unchanged."""
    original_context_length: int = 8192
    """llama3: the context length of the original training."""

    def __post_init__(self) -> None:
        _check_choice("rope_scaling.kind", self.kind, get_args(RopeScalingKind))
        if not self.factor >= 1:
            raise ConfigError(f"expected rope_scaling.factor >= 1, got {self.factor}")
        _check_positive(self, _POSITIVE_ROPE, "rope_scaling.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                "expected rope_scaling.high_freq_factor > rope_scaling.low_freq_factor = "
                f"{self.low_freq_factor}, got {self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The architecture of a decoder. The defaults are GPT-2 (124M); see `preset(name)` for other models."""

    context_length: int = 1024
    """Maximum sequence length in tokens."""
    vocab_size: int = 50257
    """Number of token ids."""
    num_layers: int = 12
    """Number of transformer blocks."""
    embd_size: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key-value heads (grouped-query attention), a divisor of `num_heads`. Default: `num_heads`."""
    head_size: int | None = None
    """Width of one head. Default: `embd_size / num_heads`."""
    mlp_size: int | None = None
    """Hidden width of the MLP. Default: `4 * embd_size`."""
    norm: NormKind = "layer"
    """LayerNorm (`layer`) or RMSNorm (`rms`)."""
    norm_eps: float = 1e-5
    """Epsilon added to the variance in norms."""
    norm_affine: bool = True
    """Whether norms have learned weights."""
    position: PositionKind = "learned"
    """Learned position embeddings (`learned`) or rotary embeddings (`rope`)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for longer contexts."""
    activation: Activation = "gelu_tanh"
    """Activation of the MLP: exact GELU (`gelu`), its tanh approximation (GPT-2), SiLU, or squared ReLU (`relu2`)."""
    gated_mlp: bool = False
    """Whether the MLP is gated, as in SwiGLU."""
    bias: Bias = "all"
    """Layers with a bias: `all` (including LayerNorm), `attention` (its linear layers), only `qkv`, or `none`."""
    qk_norm: QKNorm = "none"
    """RMSNorm on query and key heads before RoPE, with weights (`weighted`, as in Qwen3) or without."""
    sliding_window: int | None = None
    """Number of tokens that a token in a sliding-attention layer attends to, including itself."""
    layer_types: tuple[LayerType, ...] | None = None
    """`full_attention` or `sliding_attention` for each layer. Default: all sliding if `sliding_window` is set."""
    tied_head: bool = True
    """Whether the head shares its weight with the token embedding."""
    logit_softcap: float | None = None
    """Soft-cap the logits: `cap * tanh(logits / cap)`."""
    residual_scale: ResidualScale = "none"
    """`attention` multiplies the attention branch by `1 / sqrt(2 * num_layers)` in the forward pass."""
    embedding_skip: bool = False
    """Normalize the embedding `x0`; each block starts from a learned mix `a * x + b * x0` (initially a = 1, b = 0)."""
    value_embeddings: int = 0
    """Number of token embeddings that are mixed into the values of attention: table i in layer i and, counted from the
    end, in layer `num_layers - value_embeddings + i`. At most half of `num_layers`."""
    dropout: float = 0.0
    """Dropout probability in training, for the embedding and the outputs of attention and MLP. Not stored in model
    directories: loaded models have none."""
    init_std: float = 0.02
    """Standard deviation of the initial weights of linear layers."""
    embd_init_std: float = 0.02
    """Standard deviation of the initial embeddings."""
    zero_init_projections: bool = False
    """Initialize the output projections of attention and MLP to zero, so that each block starts as the identity."""
    zero_init_head: bool = False
    """Initialize an untied head to zero, so that the first prediction is uniform."""
    vocab_multiple: int = 128
    """Pad the embedding to a multiple of this many rows, for speed; saved files and logits have no padding."""

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            _check_choice(name, getattr(self, name), get_args(kind))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"expected {name} >= 1, got {value}")
            limit = MAX_LAYERS if name == "num_layers" else MAX_COUNT
            if value is not None and value > limit:
                raise ConfigError(f"expected {name} <= {limit:,}, got {value}")
        _check_positive(self, _POSITIVE)
        for name in ("init_std", "embd_init_std"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"expected {name} >= 0, got {getattr(self, name)}")
        if self.head_size is None and self.embd_size % self.num_heads:
            raise ConfigError(
                f"expected embd_size to be a multiple of num_heads = {self.num_heads}, got {self.embd_size}: "
                "change one of them or set head_size"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"expected num_heads to be a multiple of num_kv_heads = {self.kv_heads}, got {self.num_heads}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(f"expected an even head size for position = 'rope', got {self.head_dim}")
        if self.position != "rope" and self.rope_scaling is not None:
            raise ConfigError(f"rope_scaling requires position = 'rope', got position = '{self.position}'")
        self._check_blocks()
        if self.zero_init_head and self.tied_head:
            raise ConfigError("zero_init_head needs an untied head: set tied_head = false")

    def _check_blocks(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"expected dropout from 0 to below 1, got {self.dropout}")
        if not 0 <= self.value_embeddings <= self.num_layers // 2:
            raise ConfigError(
                f"expected value_embeddings from 0 to {self.num_layers // 2} (half of num_layers), got "
                f"{self.value_embeddings}"
            )
        if self.layer_types is None:
            return
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(f"expected {self.num_layers} layer_types (num_layers), got {len(self.layer_types)}")
        for kind in self.layer_types:
            _check_choice("layer_types", kind, get_args(LayerType))
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ConfigError("layer_types has sliding_attention: set sliding_window")

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.embd_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def intermediate_size(self) -> int:
        """Hidden width of the MLP."""
        return 4 * self.embd_size if self.mlp_size is None else self.mlp_size

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding, padding included."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None for full attention."""
        if self.layer_types is None:
            return (self.sliding_window,) * self.num_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    def value_embedding_of(self, layer: int) -> int | None:
        """The value embedding that a layer uses, if any."""
        from_end = layer - (self.num_layers - self.value_embeddings)
        return layer if layer < self.value_embeddings else from_end if from_end >= 0 else None

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters in embeddings and linear layers, without padding: nearly all of the model."""
        attention = 2 * (self.num_heads + self.kv_heads) * self.head_dim
        mlp = (3 if self.gated_mlp else 2) * self.intermediate_size
        embedding_rows = self.vocab_size * (1 if self.tied_head else 2)
        embedding_rows += self.context_length if self.position == "learned" else 0
        values = self.value_embeddings * self.vocab_size * self.kv_heads * self.head_dim
        return values + self.embd_size * (embedding_rows + self.num_layers * (attention + mlp))

    def to_json_string(self) -> str:
        """The config as JSON, without settings that are None."""
        return json.dumps(to_table(self), indent=2) + "\n"


MAX_LAYERS = 10_000
MAX_COUNT = 2**31 - 1
"""Upper limits: a larger value means a corrupt file, and building the model would hang."""

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
        if value is not None and not value > 0:  # `not >` also rejects NaN
            raise ConfigError(f"expected {section}{name} > 0, got {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(not_one_of(name, value, choices))
