"""The samples of a fine-tuning run, tokenized once and stored in `RUN/samples`.

The tokenizer, chat template and generation defaults are stored there, too, and copied into every checkpoint, so that
`chat` and `serve` render prompts as in training. A resumed run sees exactly the same tokens and does not need the
original data.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from whimbrel.base.errors import ConfigError, DataError, WhimbrelError
from whimbrel.base.files import atomic_directory, atomic_file, parse_json
from whimbrel.base.lock import DirectoryLock
from whimbrel.data.conversations import ConversationReader, ReadReport
from whimbrel.data.packing import SampleStats, TokenizedSamples, tokenize_samples
from whimbrel.data.sources import resolve_source
from whimbrel.distributed import World
from whimbrel.model_io import ModelSource, locate_model, open_model
from whimbrel.tokenization import ChatTemplate, Tokenizer, apply_builtin_template, load_chat_template, load_tokenizer
from whimbrel.tokenization.chat_template import TEMPLATE_FILE
from whimbrel.train.initial_model import has_checkpoint
from whimbrel.train.run_config import RunConfig

__all__ = [
    "SAMPLES",
    "ChatTokenizer",
    "PreparedSamples",
    "added_tokens",
    "choose_template",
    "is_preference",
    "prepare_samples",
]

logger = logging.getLogger(__name__)

SAMPLES = "samples"
REQUEST_FILE, REPORT_FILE = "request.json", "report.json"
MAX_SHOWN = 150
"""Maximum length of two values that an error message shows."""
GENERATION_CONFIG, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
PROCESSING_FILES = (TOKENIZER_CONFIG, TEMPLATE_FILE, GENERATION_CONFIG)


class ChatTokenizer(Tokenizer):
    """A tokenizer that saves its chat template, special tokens and generation defaults along with it."""

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer and the files next to it from a directory."""
        tokenizer = load_tokenizer(directory)
        super().__init__(tokenizer.pipeline, tokenizer.eot_token, tokenizer.bos_token)
        files = [directory / name for name in PROCESSING_FILES]
        self._files = {file.name: file.read_text(encoding="utf-8") for file in files if file.is_file()}

    def save(self, directory: Any) -> None:
        """Write the tokenizer, and the files that were loaded with it."""
        super().save(directory)
        for name, text in self._files.items():
            with atomic_file(Path(directory) / name, "w") as file:
                file.write(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSamples:
    """The tokenized samples of a run, with statistics."""

    directory: Path
    train: TokenizedSamples
    val: TokenizedSamples | None
    tokenizer: ChatTokenizer
    template: ChatTemplate | None
    """None if the model has no template, which only plain text allows."""
    template_name: str
    """Where the template comes from, for display."""
    added_tokens: tuple[int, ...]
    """Ids of the special tokens that the template adds to the model's tokenizer."""
    stats: SampleStats
    """Statistics over training and held-out samples."""
    report: ReadReport


def is_preference(config: RunConfig) -> bool:
    """Whether the objective needs preference pairs."""
    return config.objective.name in ("dpo", "orpo")


def prepare_samples(config: RunConfig, world: World | None = None) -> PreparedSamples:
    """Tokenize the samples into the run directory, unless this was done before, and load them.

    Only rank 0 writes. Raises DataError if a run would resume with different samples.
    """
    directory = config.output_dir / SAMPLES
    (world or World()).run_on_main(partial(_ensure_written, config, directory))
    report = parse_json((directory / REPORT_FILE).read_bytes())
    has_val = (directory / "val").is_dir()
    return PreparedSamples(
        directory=directory,
        train=TokenizedSamples.load(directory / "train"),
        val=TokenizedSamples.load(directory / "val") if has_val else None,
        tokenizer=ChatTokenizer(directory),
        template=load_chat_template(directory),
        template_name=report["template"],
        added_tokens=tuple(report["added_tokens"]),
        stats=SampleStats(**report["stats"]),
        report=ReadReport(**report["read"] | {"skipped": Counter(report["read"]["skipped"])}),
    )


def choose_template(source: ModelSource, name: str | None) -> tuple[ChatTemplate | None, Tokenizer]:
    """The chat template for `data.template = name`, and the tokenizer including its special tokens."""
    if name is None:
        return source.chat_template(), source.tokenizer
    return apply_builtin_template(name, source.tokenizer)


def added_tokens(tokenizer: Tokenizer, extended: Tokenizer) -> list[int]:
    """The ids that only the extended tokenizer has."""
    vocabularies = [set(each.pipeline.get_vocab(with_added_tokens=True).values()) for each in (extended, tokenizer)]
    return sorted(vocabularies[0] - vocabularies[1])


def _ensure_written(config: RunConfig, directory: Path) -> None:
    resumes = has_checkpoint(config)
    request = _request(config)
    if (directory / REQUEST_FILE).is_file() and not config.overwrite_output_dir:
        found = parse_json((directory / REQUEST_FILE).read_bytes())
        changed = [name for name, value in request.items() if value != found.get(name)]
        if not changed or (resumes and changed == ["model.path"]):  # the base model may have been moved
            return
        if resumes:
            changed = [name for name in changed if name != "model.path"]
            raise DataError(
                f"{changed[0]} has changed since the run in {config.output_dir} was started"
                f"{_difference(found.get(changed[0]), request[changed[0]])}: restore it, or choose another output_dir"
            )
    with DirectoryLock(config.output_dir):
        _write(config, request, directory)


def _request(config: RunConfig) -> dict[str, Any]:
    """Everything that determines the samples. When resuming, files that no longer exist are left out."""
    data, validation = config.data, config.validation.path
    assert data.sources is not None
    names = ("format", "template", "train_on", "packing", "too_long", "skip_bad", "val")
    request = {
        "model.path": str(_model_path(config).resolve()),
        **{f"data.{name}": getattr(data, name) for name in names},
        "data.sequence_length": config.sequence_length,
        "train.seed": config.train.seed,
        "the objective": {name: str(value) for name, value in asdict(config.objective).items()},
    }
    content: dict[str, Callable[[], Any]] = {
        "the tokenizer": lambda: open_model(_model_path(config)).tokenizer.fingerprint,
        "the chat template": lambda: _template_source(config),
        "the content of data.path": lambda: _records(data.sources or ()),
        "the content of validation.path": lambda: None if validation is None else _records([str(validation)]),
    }
    for name, read in content.items():
        try:
            request[name] = read()
        except WhimbrelError:
            if not has_checkpoint(config):
                raise
    return request


def _model_path(config: RunConfig) -> Path:
    assert config.model.path is not None  # checked by RunConfig
    return config.model.path


def _template_source(config: RunConfig) -> str | None:
    """The model's chat template, unless data.template replaces it."""
    template = None if config.data.template is not None else locate_model(_model_path(config)).chat_template()
    return None if template is None else template.source


def _records(sources: Sequence[str]) -> list[dict[str, Any]]:
    return [asdict(file.record("train")) for source in sources for file in resolve_source(source)]


def _difference(old: Any, new: Any) -> str:
    """How two values of a request differ, in parentheses; empty if they are too long to show."""
    if isinstance(old, dict) and isinstance(new, dict):
        changes = [f"{name} was {old.get(name)}, now {new.get(name)}" for name in new if old.get(name) != new[name]]
        return f" ({', '.join(changes)})"
    if isinstance(old, list) and isinstance(new, list):  # records of files
        before, after = ([str(record["name"]) for record in records] for records in (old, new))
        if before == after:
            return f" ({next(name for name, a, b in zip(before, old, new, strict=True) if a != b)} is not the same)"
        old, new = ", ".join(before), ", ".join(after)
        if len(old + new) > MAX_SHOWN:
            different = [name for name in (*before, *after) if (name in before) != (name in after)]
            names = f", of which {different[0]} is only in one of them" if different else ""
            return f" (expected {len(before)} files, got {len(after)}{names})"
    shown = f" (expected {json.dumps(old)}, got {json.dumps(new)})"
    return shown if len(shown) <= MAX_SHOWN else ""


def _write(config: RunConfig, request: Mapping[str, Any], directory: Path) -> None:
    source, data = open_model(_model_path(config)), config.data
    template, tokenizer = choose_template(source, data.template)
    name = "the model's own" if data.template is None else f"{data.template} (built-in)"
    assert data.sources is not None
    with atomic_directory(directory, replace=True) as folder:
        _save_processing_files(source, tokenizer, template, folder)
        saved = ChatTokenizer(folder), load_chat_template(folder)  # exactly what checkpoints will load
        reader = ConversationReader(data.sources, format=data.format, skip_bad=data.skip_bad)
        samples = _tokenize(reader, *saved, config)
        stats = samples.stats
        train, val = (samples, None) if data.val is None else samples.split(data.val, config.train.seed)
        if config.validation.path is not None:
            val = _tokenize(
                ConversationReader([str(config.validation.path)], format=data.format, skip_bad=data.skip_bad),
                *saved, config,
            )  # fmt: skip
        train.save(folder / "train")
        if val is not None:
            val.save(folder / "val")
        report = {
            "template": name if template is not None else "none",
            "added_tokens": added_tokens(source.tokenizer, tokenizer),
            "stats": asdict(stats),
            "read": {
                "formats": reader.report.formats,
                "samples": reader.report.samples,
                "skipped": reader.report.skipped,
                "errors": reader.report.errors,
            },
        }
        (folder / REPORT_FILE).write_text(json.dumps(report, indent=1))
        (folder / REQUEST_FILE).write_text(json.dumps(request, indent=1))


def _tokenize(
    reader: ConversationReader, tokenizer: Tokenizer, template: ChatTemplate | None, config: RunConfig
) -> TokenizedSamples:
    """Tokenize samples, limited to what fits into a sequence: one sample, or both answers of a preference pair."""
    data, name = config.data, config.objective.name
    both = is_preference(config) and data.packing
    samples = tokenize_samples(
        reader,
        tokenizer,
        template,
        train_on=data.train_on,
        max_tokens=config.sequence_length // (2 if both else 1),
        too_long=data.too_long,
    )
    formats = set(reader.report.formats.values())
    if samples.pair != is_preference(config):
        wanted = "dpo or orpo" if samples.pair else "sft"
        raise ConfigError(
            f"expected {'conversations or text' if samples.pair else 'preference pairs'} for objective.name = "
            f"{name or 'sft'}, got the format {', '.join(sorted(formats))}: set objective.name = {wanted}, or use "
            "other data"
        )
    if name == "lm" and formats != {"text"}:
        raise ConfigError(
            f"objective.name = lm needs text, got the format {', '.join(sorted(formats - {'text'}))}: use sft, with "
            "data.train_on = all to train on every token"
        )
    return samples


def _save_processing_files(
    source: ModelSource, tokenizer: Tokenizer, template: ChatTemplate | None, folder: Path
) -> None:
    """Write tokenizer, template and generation defaults, with exactly the special tokens that the template sees."""
    tokenizer.save(folder)
    directory = source.location.find(GENERATION_CONFIG)
    fields = {} if directory is None else parse_json((directory / GENERATION_CONFIG).read_bytes())
    eos = [tokenizer.eot_id, *(token for token in source.generation_config.eos_token_ids if token != tokenizer.eot_id)]
    fields |= {"bos_token_id": source.generation_config.bos_token_id, "eos_token_id": eos if len(eos) > 1 else eos[0]}
    (folder / GENERATION_CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if template is not None:
        template.save(folder)
        settings = parse_json((folder / TOKENIZER_CONFIG).read_bytes())
        if "bos_token" not in template.special_tokens:  # otherwise, templates that use bos_token would render it
            settings.pop("bos_token", None)
        settings |= template.special_tokens | {"eos_token": tokenizer.eot_token}
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
