"""`import whimbrel.hf` registers the model type `whimbrel` and our quantized weights with transformers.

`AutoConfig` and `AutoModelForCausalLM` then load every directory that whimbrel saves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError, MissingExtraError, RequestError
from whimbrel.cache import Cache, DynamicLayer
from whimbrel.config import build, to_table
from whimbrel.model_io.weights import CODES, METHOD, QUANTIZATION, SCALES, TRANSFORMERS_WEIGHTS, stored_format
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.layers import padded_positions
from whimbrel.precision import QuantizedWeight, WeightFormat, keep_quantized

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        DynamicCache,
        EncoderDecoderCache,
        GenerationMixin,
        PretrainedConfig,
        PreTrainedModel,
    )
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise MissingExtraError("whimbrel.hf", "transformers", "hf") from error

__all__ = [
    "CrossAttentionCache",
    "WhimbrelConfig",
    "WhimbrelForCausalLM",
    "WhimbrelQuantizationConfig",
    "WhimbrelQuantizer",
]


class CrossAttentionCache(EncoderDecoderCache):
    """Wraps two Whimbrel caches as the `past_key_values` of an encoder-decoder model.

    `EncoderDecoderCache` accepts only transformers caches. Models read the stored encoder keys directly from the
    layers of `cross_attention_cache`, so these cannot be quantized.
    """

    def __init__(self, self_attention_cache: Cache, cross_attention_cache: Cache) -> None:
        layer_class = cross_attention_cache.layer_class_to_replicate
        for layer in [*cross_attention_cache.layers, *(() if layer_class is None else (layer_class(),))]:
            if not isinstance(layer, DynamicLayer) or layer.codec is not None:
                raise ConfigError(
                    f"cross_attention_cache: expected layers of type DynamicLayer without a codec, got {layer!r}"
                )
        super().__init__(DynamicCache(), DynamicCache())
        self.self_attention_cache: Any = self_attention_cache
        self.cross_attention_cache: Any = cross_attention_cache
        self.is_updated = {
            index: layer.get_seq_length() > 0 for index, layer in enumerate(cross_attention_cache.layers)
        }

    def check_dynamic_cache(self, method: str) -> None:
        """Do nothing: our caches raise errors for unsupported operations themselves."""


class WhimbrelConfig(PretrainedConfig):
    """A transformers config with our `GPTConfig` under the key `gpt`."""

    model_type = "whimbrel"

    def __init__(self, gpt: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.gpt = to_table(GPTConfig()) if gpt is None else gpt
        gpt_config = self.gpt_config
        self.vocab_size, self.hidden_size = gpt_config.vocab_size, gpt_config.embd_size
        self.num_hidden_layers, self.num_attention_heads = gpt_config.num_layers, gpt_config.num_heads
        self.num_key_value_heads, self.head_dim = gpt_config.kv_heads, gpt_config.head_dim
        self.max_position_embeddings = gpt_config.context_length
        super().__init__(**kwargs | {"tie_word_embeddings": gpt_config.tied_head})

    @property
    def gpt_config(self) -> GPTConfig:
        """The architecture as a `GPTConfig`."""
        return build(GPTConfig, self.gpt, "gpt")


class WhimbrelForCausalLM(PreTrainedModel, GenerationMixin):
    """`GPT` as a transformers model; parameter names are those in our files."""

    config_class = WhimbrelConfig
    base_model_prefix = "transformer"
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012 (transformers reads this attribute)
    _supports_sdpa = True
    accepts_loss_kwargs = True  # transformers.Trainer then passes `num_items_in_batch`

    def __init__(self, config: WhimbrelConfig) -> None:
        super().__init__(config)
        decoder = GPT(replace(config.gpt_config, vocab_multiple=1))
        self.transformer, self.lm_head = decoder.transformer, decoder.lm_head
        self._decoder = (decoder,)  # in a tuple, so that its parameters are not registered twice
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: `GPT` initializes its own weights."""

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self._decoder[0].token_embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        *,
        num_items_in_batch: float | Tensor | None = None,
        position_ids: Tensor | None = None,
        cache_position: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Takes the arguments of a transformers causal LM; see `GPT.forward`.

        `position_ids` and `cache_position` are accepted only if they match the positions implied by
        `attention_mask` and the cache.
        """
        if output_attentions or output_hidden_states:
            raise RequestError("output_attentions and output_hidden_states are not supported: omit them")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        tokens, stored = input_ids.size(1), 0 if past_key_values is None else past_key_values.get_seq_length()
        consecutive = torch.arange(stored, stored + tokens, device=input_ids.device)
        expected = consecutive if attention_mask is None else padded_positions(attention_mask)[:, -tokens:]
        for name, actual, positions in (
            ("position_ids", position_ids, expected),
            ("cache_position", cache_position, consecutive),
        ):
            if actual is not None and not _equal_positions(actual, positions):
                raise RequestError(
                    f"expected {name} = {stored}, {stored + 1}, ... without gaps between non-padding tokens: packed "
                    "sequences are not supported; omit it"
                )
        loss, logits = self._decoder[0](
            input_ids,
            attention_mask=attention_mask,
            labels=labels,
            cache=past_key_values,
            num_items_in_batch=num_items_in_batch,
            logits_to_keep=logits_to_keep or None,
        )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        as_tuple = not (self.config.return_dict if return_dict is None else return_dict)
        return output.to_tuple() if as_tuple else output


def _equal_positions(actual: Tensor, expected: Tensor) -> bool:
    """Whether positions are equal, ignoring padding (-1 in `expected`)."""
    return actual.shape[-1] == expected.shape[-1] and bool(((actual == expected) | (expected < 0)).all())


@register_quantization_config(METHOD)
class WhimbrelQuantizationConfig(QuantizationConfigMixin):
    """The `quantization_config` in our directories."""

    def __init__(self, **kwargs: Any) -> None:
        if stored_format({QUANTIZATION: kwargs}) is None:
            raise ConfigError(f"expected quant_method = {METHOD!r}, got {kwargs.get('quant_method')!r}")
        self.quant_method: Any = METHOD
        self.version, self.recipe, self.format = kwargs["version"], kwargs["recipe"], kwargs["format"]

    @property
    def weight_format(self) -> WeightFormat:
        """The format of the weights."""
        weight_format = stored_format({QUANTIZATION: self.to_dict()})
        assert weight_format is not None
        return weight_format


@register_quantizer(METHOD)
class WhimbrelQuantizer(HfQuantizer):
    """Combines codes and scales into quantized weights while loading; linear layers keep their class."""

    requires_calibration = True  # only directories that are already quantized can be loaded
    quantization_config: WhimbrelQuantizationConfig

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Combine two stored tensors into one parameter."""
        return [WeightConverter([f"weight{CODES}", f"weight{SCALES}"], "weight", [_CombineCodesAndScales(self)])]

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove the config entry that makes transformers reject the directory without this quantizer.

        Of all quantizer methods, this is the one that transformers calls with the config before it locates the files.
        """
        if getattr(config, TRANSFORMERS_WEIGHTS, None) is not None:
            setattr(config, TRANSFORMERS_WEIGHTS, None)
        return config

    def update_tp_plan(self, config: Any) -> Any:
        """The same, for older versions of transformers, which do not call `update_attn_implementation`."""
        return self.update_attn_implementation(config)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Keep quantized layers quantized when other weights are loaded into them later."""
        for module in model.modules():
            if isinstance(getattr(module, "weight", None), QuantizedWeight):
                keep_quantized(module)
        return model

    def is_serializable(self) -> bool:
        """False: `save_pretrained` does not support our format."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: quantized weights are frozen."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True: the quantized product works with torch.compile."""
        return True


class _CombineCodesAndScales(ConversionOps):
    """Combines codes and scales into a quantized weight, transposed for the Conv1D layers of GPT-2."""

    def __init__(self, hf_quantizer: WhimbrelQuantizer) -> None:
        self.hf_quantizer = hf_quantizer  # with this attribute the loader does not convert dtypes

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str = "",
        model: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Return the weight in the dtype of the model."""
        codes, scales = (input_dict[name][0] for name in source_patterns)
        module = model.get_submodule(full_layer_name.rpartition(".")[0])
        weight_format, dtype = self.hf_quantizer.quantization_config.weight_format, module.weight.dtype
        weight_format = weight_format.fit_to(weight_format.weight_shape(codes))
        weight = QuantizedWeight(codes, scales.to(dtype), weight_format, transposed=isinstance(module, Conv1D))
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


AutoConfig.register("whimbrel", WhimbrelConfig)
AutoModelForCausalLM.register(WhimbrelConfig, WhimbrelForCausalLM)
