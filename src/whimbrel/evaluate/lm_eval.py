"""lm-eval adapter: importing this module registers the model type `whimbrel` with lm-eval.

    python -m whimbrel.evaluate.lm_eval run --model whimbrel --model_args pretrained=DIR --tasks hellaswag

is the lm-eval command line with that model type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from whimbrel.base.errors import ConfigError, MissingExtraError, RequestError
from whimbrel.evaluate.generation import split_stops
from whimbrel.evaluate.scoring import Scorer
from whimbrel.inference import LLM, Request, SamplingParams
from whimbrel.model_io import load
from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, ChatTemplate, Message
from whimbrel.train.device import choose_device

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise MissingExtraError("the lm-eval adapter", "lm-eval", "lm-eval") from error

__all__ = ["WhimbrelLM"]

DTYPES = {"auto": None, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_NEW_TOKENS = 256
"""Used if a task does not set `max_gen_toks`."""


@register_model("whimbrel")
class WhimbrelLM(LM):  # type: ignore[misc]
    """The model interface of lm-eval, implemented with `Scorer` and the inference engine."""

    def __init__(
        self,
        pretrained: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        quantize: str | None = None,
        device: str | None = None,
        batch_size: int | str = "auto",
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        if batch_size != "auto" and not str(batch_size).isdecimal():
            raise ConfigError(f"batch_size: expected a number or auto, got {batch_size!r}")
        if device == "cuda:0" and not torch.cuda.is_available():  # lm-eval's default
            device = None
        self._device = choose_device(device)
        self._batch_size = None if batch_size == "auto" else int(batch_size)
        loaded = load(pretrained, tokenizer=tokenizer, device=self._device, dtype=DTYPES[dtype], quantize=quantize)
        self.scorer = Scorer.from_loaded(loaded)
        self._location = loaded.location

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would generate it."""
        pairs = self.scorer.encode_pairs([request.args for request in requests])
        return [(*score,) for score in self.scorer.score(pairs, batch_size=self._batch_size)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Log-likelihood of each complete text."""
        pairs = self.scorer.encode_documents([request.args[0] for request in requests])
        return [score.loglikelihood for score in self.scorer.score(pairs, batch_size=self._batch_size)]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Generate after each context, up to a stop string or EOS."""
        generations = [self._request(*request.args) for request in requests]
        limits: dict[str, Any] = {} if self._batch_size is None else {"max_batch": self._batch_size}
        llm = LLM(self.scorer.model, self.scorer.tokenizer, **limits)
        outputs = llm.complete([request for request, _ in generations], [stops for _, stops in generations])
        return [output.outputs[0].text or "" for output in outputs]

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Render a conversation, up to the generation prompt or to the end of the last message."""
        text = self._template().render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the model's default template, or of the one with the given name."""
        return self._template(chat_template if isinstance(chat_template, str) else "default").source

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in lm-eval's request cache."""
        return self.scorer.tokenizer.fingerprint

    def _template(self, name: str = "default") -> ChatTemplate:
        return self._location.chat_template(name) or DEFAULT_CHAT_TEMPLATE

    def _request(self, context: str, settings: Mapping[str, Any]) -> tuple[Request, list[str]]:
        """A request for the engine, and its stop strings."""
        options = dict(settings)
        until = options.pop("until", None) or []
        count = int(options.pop("max_gen_toks", options.pop("max_new_tokens", MAX_NEW_TOKENS)))
        do_sample, temperature = options.pop("do_sample", None), options.pop("temperature", None)
        if do_sample is None:
            do_sample = bool(temperature)
        sampling_options = {name: options.pop(name, None) for name in ("top_k", "top_p")}
        if options:
            raise RequestError(f"unknown generation_kwargs: {', '.join(options)}")
        sampling = SamplingParams(temperature=(temperature or 1.0) if do_sample else 0.0, **sampling_options)
        max_prompt = max(1, self.scorer.model.config.context_length - count)
        prompt = self.scorer.encode_prompt(context)[-max_prompt:]
        stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
        strings, ids = split_stops(self.scorer.tokenizer, stops)
        stop_ids = self.scorer.eos_ids | {self.scorer.tokenizer.eot_id} | ids
        request = Request(prompt_ids=tuple(prompt), max_new_tokens=count, sampling=sampling, stop_ids=stop_ids)
        return request, strings


if __name__ == "__main__":
    cli_evaluate()
