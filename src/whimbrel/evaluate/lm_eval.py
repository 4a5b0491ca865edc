"""Whimbrel's models inside lm-eval: importing this registers the model `whimbrel` there.

    python -m whimbrel.evaluate.lm_eval run --model whimbrel --model_args pretrained=DIR --tasks hellaswag

is lm-eval's own command line with that model added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from whimbrel.base.errors import ConfigError, MissingExtraError, RequestError
from whimbrel.evaluate.subject import Subject
from whimbrel.inference import Engine, EngineConfig, Request, SamplingParams, TextStream
from whimbrel.model_io import load
from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, ChatTemplate, Message, load_chat_template
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
NEW_TOKENS = 256
"""How many tokens are written at most where a task does not say."""


@register_model("whimbrel")
class WhimbrelLM(LM):  # type: ignore[misc]
    """What lm-eval asks of a model, answered by `Subject` and the engine."""

    def __init__(
        self,
        pretrained: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        weights: str | None = None,
        device: str | None = None,
        batch_size: int | str = "auto",
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ConfigError(f"dtype = {dtype} is not one of {', '.join(DTYPES)}")
        if batch_size != "auto" and not str(batch_size).isdecimal():
            raise ConfigError(f"batch_size = {batch_size} must be a number of rows, or auto")
        if device == "cuda:0" and not torch.cuda.is_available():  # what lm-eval says where nobody named one
            device = None
        self._device = choose_device(device)
        self._rows = None if batch_size == "auto" else int(batch_size)
        loaded = load(pretrained, tokenizer=tokenizer, device=self._device, dtype=DTYPES[dtype], quantize=weights)
        self.subject = Subject(loaded.model, loaded.tokenizer, loaded.generation_config.bos_token_id)
        self._source = loaded.path
        self._ends = frozenset(loaded.generation_config.eos_token_ids)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Of each continuation after its context, and whether greedy decoding would write it."""
        pairs = self.subject.pairs([request.args for request in requests])
        return [(*score,) for score in self.subject.score(pairs, batch_size=self._rows)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Of each text, every token once."""
        pairs = self.subject.rolling([request.args[0] for request in requests])
        return [score.loglikelihood for score in self.subject.score(pairs, batch_size=self._rows)]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """What the model writes after each context, up to a stop string or the end of the text."""
        asked = [self._asked(*request.args) for request in requests]
        engine = Engine(
            self.subject.model, EngineConfig() if self._rows is None else EngineConfig(max_batch=self._rows)
        )
        numbers = [engine.add_request(request) for request, _ in asked]
        texts = dict(zip(numbers, (text for _, text in asked), strict=True))
        written: dict[int, list[str]] = {number: [] for number in numbers}
        while engine.busy:
            for number, _, token, *_ in engine.step():
                if token is not None and not texts[number].stopped:
                    written[number].append(texts[number].push(token))
                if texts[number].stopped:
                    engine.abort(number)
        return ["".join(written[number]) + texts[number].flush() for number in numbers]

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """A conversation as the model was taught to read it, up to its answer, or to the end of the last message."""
        text = self._template().render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's own text; one that the model has by another name where that is given."""
        return self._template(chat_template if isinstance(chat_template, str) else "default").source

    @property
    def tokenizer_name(self) -> str:
        """What tells requests made with this tokenizer from others, where lm-eval keeps them."""
        return self.subject.tokenizer.fingerprint

    def _template(self, name: str = "default") -> ChatTemplate:
        return (load_chat_template(self._source, name) if self._source.is_dir() else None) or DEFAULT_CHAT_TEMPLATE

    def _asked(self, context: str, settings: Mapping[str, Any]) -> tuple[Request, TextStream]:
        """A request to the engine, and what makes text of the answer."""
        known = dict(settings)
        until = known.pop("until", None) or []
        count = int(known.pop("max_gen_toks", known.pop("max_new_tokens", NEW_TOKENS)))
        drawn, temperature = known.pop("do_sample", None), known.pop("temperature", None)
        if drawn is None:
            drawn = bool(temperature)
        shape = {name: known.pop(name, None) for name in ("top_k", "top_p")}
        if known:
            raise RequestError(f"generation_kwargs {', '.join(known)} are not known: leave them out")
        sampling = SamplingParams(temperature=(temperature or 1.0) if drawn else 0.0, **shape)
        room = max(1, self.subject.model.config.context_length - count)
        prompt = self.subject.prompt(context)[-room:]
        stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
        request = Request(prompt_ids=tuple(prompt), max_new_tokens=count, sampling=sampling, stop_ids=self._ends)
        return request, TextStream(self.subject.tokenizer, prompt, stops)


if __name__ == "__main__":
    cli_evaluate()
