"""`import whimbrel.hf` teaches `transformers` the model type `whimbrel`, and quantised weights in models of any type.

`AutoConfig` and `AutoModelForCausalLM` then open every directory that `whimbrel` writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError, MissingExtraError, RequestError
from whimbrel.cache import Cache, DynamicLayer
from whimbrel.config import build, to_table
from whimbrel.model_io.quantized import CODES, METHOD, QUANTIZATION, SCALES, WEIGHTS_FILE, stored_format
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

__all__ = ["CrossAttentionCache", "WhimbrelConfig", "WhimbrelForCausalLM", "WhimbrelQuantization", "WhimbrelQuantizer"]


class CrossAttentionCache(EncoderDecoderCache):
    """Two of our caches as the `past_key_values` of an encoder-decoder model.

    `EncoderDecoderCache` itself takes only caches of `transformers`. Models read the keys of the encoder from the
    layers of `cross_attention_cache` as they are stored, so these can have no codec.
    """

    def __init__(self, self_attention_cache: Cache, cross_attention_cache: Cache) -> None:
        make = cross_attention_cache.layer_class_to_replicate
        for layer in [*cross_attention_cache.layers, *(() if make is None else (make(),))]:
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
        """Our caches refuse by themselves what they cannot do."""


class WhimbrelConfig(PretrainedConfig):
    """A `GPTConfig` inside a `transformers` configuration, under the key `gpt`."""

    model_type = "whimbrel"

    def __init__(self, gpt: dict[str, Any] | None = None, **settings: Any) -> None:
        self.gpt = to_table(GPTConfig()) if gpt is None else gpt
        shape = self.shape
        self.vocab_size, self.hidden_size = shape.vocab_size, shape.embd_size
        self.num_hidden_layers, self.num_attention_heads = shape.num_layers, shape.num_heads
        self.num_key_value_heads, self.head_dim = shape.kv_heads, shape.head_width
        self.max_position_embeddings = shape.context_length
        super().__init__(**settings | {"tie_word_embeddings": shape.tied_head})

    @property
    def shape(self) -> GPTConfig:
        """The shape of the decoder, as we spell it."""
        return build(GPTConfig, self.gpt, "gpt")


class WhimbrelForCausalLM(PreTrainedModel, GenerationMixin):
    """`GPT` with the calling convention of `transformers`; its tensors have the names that our files give them."""

    config_class = WhimbrelConfig
    base_model_prefix = "transformer"
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012 (the name and kind transformers asks for)
    _supports_sdpa = True
    accepts_loss_kwargs = True  # so `Trainer` hands over `num_items_in_batch`

    def __init__(self, config: WhimbrelConfig) -> None:
        super().__init__(config)
        decoder = GPT(replace(config.shape, vocab_multiple=1))
        self.transformer, self.lm_head = decoder.transformer, decoder.lm_head
        self._decoder = (decoder,)  # in a tuple, so that its tensors are registered once, under our names
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: `GPT` has drawn its own weights."""

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
        """The arguments of a causal language model in transformers; see `GPT.forward`.

        `position_ids` and `cache_position` are accepted only if they equal the positions that follow from
        `attention_mask` and the cache.
        """
        if output_attentions or output_hidden_states:
            raise RequestError("output_attentions and output_hidden_states are not supported: leave them out")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        tokens, stored = input_ids.size(1), 0 if past_key_values is None else past_key_values.get_seq_length()
        consecutive = torch.arange(stored, stored + tokens, device=input_ids.device)
        expected = consecutive if attention_mask is None else padded_positions(attention_mask)[:, -tokens:]
        for name, given, positions in (
            ("position_ids", position_ids, expected),
            ("cache_position", cache_position, consecutive),
        ):
            if given is not None and not _equal_positions(given, positions):
                raise RequestError(
                    f"expected {name} to count {stored}, {stored + 1}, ... over {tokens} tokens without padding: "
                    "packed sequences are not supported, omit it"
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


def _equal_positions(given: Tensor, expected: Tensor) -> bool:
    """Whether positions are equal, except those of padding, which `expected` has as -1."""
    return given.shape[-1] == expected.shape[-1] and bool(((given == expected) | (expected < 0)).all())


@register_quantization_config(METHOD)
class WhimbrelQuantization(QuantizationConfigMixin):
    """The `quantization_config` of our directories."""

    def __init__(self, **table: Any) -> None:
        if stored_format({QUANTIZATION: table}) is None:
            raise ConfigError(
                f"quant_method = {table.get('quant_method')!r} is not {METHOD!r}: open another class for it"
            )
        self.quant_method: Any = METHOD
        self.version, self.recipe, self.format = table["version"], table["recipe"], table["format"]

    @property
    def form(self) -> WeightFormat:
        """The format of the weights."""
        form = stored_format({QUANTIZATION: self.to_dict()})
        assert form is not None
        return form


@register_quantizer(METHOD)
class WhimbrelQuantizer(HfQuantizer):
    """Puts codes and scales together as they are read: the linears of a model stay what they are, with our weights."""

    requires_calibration = True  # what their word for it means: directories that are quantised already, no others
    quantization_config: WhimbrelQuantization

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Two stored tensors to one parameter."""
        return [WeightConverter([f"weight{CODES}", f"weight{SCALES}"], "weight", [_Join(self)])]

    def update_attn_implementation(self, config: Any) -> Any:
        """Let the weights be found under their usual names: without us, this entry makes `transformers` refuse them.

        Of what transformers asks a quantizer, this comes before it looks for files and is given the config.
        """
        if getattr(config, WEIGHTS_FILE, None) is not None:
            setattr(config, WEIGHTS_FILE, None)
        return config

    def update_tp_plan(self, config: Any) -> Any:
        """The same for versions of transformers that do not ask for the attention yet."""
        return self.update_attn_implementation(config)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Layers that are quantised stay so, whatever is loaded into them later."""
        for module in model.modules():
            if isinstance(getattr(module, "weight", None), QuantizedWeight):
                keep_quantized(module)
        return model

    def is_serializable(self) -> bool:
        """No: the directory that was opened is what there is to keep."""
        return False

    @property
    def is_trainable(self) -> bool:
        """No: quantised weights stay as they are."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Yes."""
        return True


class _Join(ConversionOps):
    """Codes and scales to a quantised weight; of GPT-2's layers, which hold theirs transposed, to its transpose."""

    def __init__(self, hf_quantizer: WhimbrelQuantizer) -> None:
        self.hf_quantizer = hf_quantizer  # the name by which the loader knows to leave dtypes to us

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
        """One weight, in the dtype that the model is to have."""
        codes, scales = (input_dict[name][0] for name in source_patterns)
        module = model.get_submodule(full_layer_name.rpartition(".")[0])
        form, dtype = self.hf_quantizer.quantization_config.form, module.weight.dtype
        form = form.fit_to(form.weight_shape(codes))
        weight = QuantizedWeight(codes, scales.to(dtype), form, transposed=isinstance(module, Conv1D))
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


AutoConfig.register("whimbrel", WhimbrelConfig)
AutoModelForCausalLM.register(WhimbrelConfig, WhimbrelForCausalLM)
