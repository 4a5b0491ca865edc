"""`whimbrel finalize`, `push` and `export`: write a model for publishing, upload it, or convert it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from whimbrel.base.errors import ConfigError
from whimbrel.cli.model_options import Base

if TYPE_CHECKING:
    from whimbrel.model_io import FinalizeResult, HeldOutResult
    from whimbrel.models import GPT

__all__ = ["export", "finalize", "push"]

GGUF = ".gguf"
FILE_SUFFIXES = {".bin", ".safetensors", ".pt", ".pth", ".onnx", ".json", ".txt", ".zip", ".tar", ".gz"}
"""Suffixes of files that `whimbrel export` does not write."""
MAX_TOKENS = 2**20
"""Default number of held-out tokens to evaluate."""
FINALIZE_FIRST = "run `whimbrel finalize` with --data, and push the directory it writes"
"""What to do for a held-out loss in the model card of `whimbrel push`, which has no --data."""

Source = Annotated[
    Path,
    typer.Argument(
        help="A run (its newest checkpoint), a checkpoint, a model or adapter directory, or owner/name on the Hugging "
        "Face Hub."
    ),
]
FinalRecipe = Annotated[
    str | None,
    typer.Option(
        help="int8, int8-dynamic, int4, int4-weight-only, fp8, int8-dynamic-act-int4-weight or none. (default: the "
        "recipe of a QAT run, else none)"
    ),
]
HeldOutData = Annotated[
    str | None,
    typer.Option(help="Held-out token shards, text or chats to evaluate on. (default: the run's validation data)"),
]
IgnoreRecipe = Annotated[
    bool,
    typer.Option("--ignore-qat-recipe", help="Allow a recipe other than the one a QAT run was trained for."),
]
Merge = Annotated[bool, typer.Option("--merge", help="Merge the adapters into the weights of the base model.")]


def finalize(
    source: Source,
    out: Annotated[Path, typer.Argument(help="The new model directory.")],
    quantize: FinalRecipe = None,
    quantize_embeddings: Annotated[
        bool, typer.Option("--quantize-embeddings", help="Also quantize the token embedding and the head.")
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Which checkpoint of a run to use: latest, best or a step number. (default: latest)"),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Dtype of unquantized weights and of scales.")
    ] = None,
    data: HeldOutData = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of held-out tokens.")] = MAX_TOKENS,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja chat template.")] = None,
    generation_config: Annotated[
        Path | None, typer.Option(help="A JSON file in the format of generation_config.json.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="max_new_tokens to store in the generation config.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="temperature to store in the generation config; 0 is greedy.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="top_k to store in the generation config.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="top_p to store in the generation config."),
    ] = None,
    ignore_qat_recipe: IgnoreRecipe = False,
    merge: Merge = False,
    base: Base = None,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu. (default: the fastest available)")] = None,
) -> None:
    """Prepare a model for publishing: quantize it and add a tokenizer, chat template, generation config and model card.

    Prints the held-out loss before and after the conversion, and records it in README.md and finalize.json. A run with
    adapters becomes a PEFT directory, or a complete model with --merge.
    """
    from whimbrel.tokenization.chat_template import read_template

    if chat_template is not None and not chat_template.is_file():
        raise ConfigError(f"no chat template at {chat_template}: expected a Jinja file")
    template = None if chat_template is None else read_template(chat_template)
    generation = _generation_fields(generation_config, temperature, top_k, top_p, max_new_tokens)
    _finalize(
        source,
        out,
        quantize=quantize,
        quantize_embeddings=quantize_embeddings,
        checkpoint=checkpoint,
        dtype=dtype,
        data=data,
        tokens=tokens,
        chat_template=template,
        generation=generation,
        ignore_qat_recipe=ignore_qat_recipe,
        merge=merge,
        base=base,
        device=device,
    )


def _finalize(
    source: Path,
    out: Path,
    *,
    name: str | None = None,
    quantize: str | None = None,
    quantize_embeddings: bool = False,
    checkpoint: str | None = None,
    dtype: str | None = None,
    data: str | None = None,
    tokens: int = MAX_TOKENS,
    chat_template: str | None = None,
    generation: Mapping[str, Any] | None = None,
    ignore_qat_recipe: bool = False,
    merge: bool = False,
    base: Path | None = None,
    device: str | None = None,
) -> None:
    """Write the model directory `out` and print a summary; `name` is the model's name (default: `out`)."""
    import torch

    from whimbrel.config import load_toml
    from whimbrel.model_io import finalize_adapter, finalize_model, locate_model
    from whimbrel.model_io.adapter import base_reference
    from whimbrel.model_io.locate import choose_checkpoint, find_run
    from whimbrel.train.device import choose_device
    from whimbrel.train.evaluation import greater_is_better

    run = find_run(source)
    file = None if run is None else run / "config.toml"
    settings = load_toml(file) if file is not None and file.is_file() else {}
    recipe = _choose_recipe(quantize, settings.get("train", {}).get("qat_recipe"), ignore_qat_recipe=ignore_qat_recipe)
    if checkpoint is not None:
        saved = settings.get("checkpoint", {})
        higher_is_better = greater_is_better(saved.get("metric", "loss"), saved.get("greater_is_better"))
        source = choose_checkpoint(source, checkpoint, greater_is_better=higher_is_better)
    location = locate_model(source, base)
    if merge and not location.is_adapter:
        raise ConfigError(f"--merge needs a run or directory with adapters, got {source}: omit it")
    if location.is_adapter and not merge:
        _check_unmerged({"--quantize": recipe, "--dtype": dtype, "--data": data})
        copied = finalize_adapter(source, out, name=name, base=base, chat_template=chat_template, generation=generation)
        print(f"{name or out}: adapter of {base_reference(copied.root)[0]}; --merge writes a complete model")
        return
    evaluate, note = _held_out_evaluation(source, base, run, settings, data, tokens, is_push=name is not None)
    result = finalize_model(
        source,
        out,
        name=name,
        base=base,
        recipe=recipe,
        embeddings=quantize_embeddings,
        dtype={None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype],
        device=choose_device(device),
        chat_template=chat_template,
        generation=generation,
        settings=_card_settings(settings),
        evaluate=evaluate,
    )
    _print_result(name or str(out), result)
    if note is not None:
        print(note)


def _check_unmerged(options: Mapping[str, object]) -> None:
    """Raise for options that change the base weights, which a PEFT directory does not contain."""
    for option in (option for option, value in options.items() if value is not None):
        raise ConfigError(f"{option} needs --merge for a model with adapters: add it, or omit {option}")


def _choose_recipe(quantize: str | None, qat_recipe: str | None, *, ignore_qat_recipe: bool) -> str | None:
    from whimbrel.model_io.weights import weight_recipe

    if quantize is None:
        return qat_recipe
    if quantize == "none":
        return None
    weight_format = weight_recipe("--quantize", quantize).finalize
    if (
        qat_recipe is not None
        and weight_recipe("qat_recipe", qat_recipe).finalize != weight_format
        and not ignore_qat_recipe
    ):
        raise ConfigError(
            f"expected --quantize {qat_recipe}, which the run was trained for (train.qat_recipe), got {quantize}: omit "
            "--quantize, or pass --ignore-qat-recipe too"
        )
    return quantize


def _generation_fields(
    file: Path | None, temperature: float | None, top_k: int | None, top_p: float | None, max_new_tokens: int | None
) -> dict[str, Any]:
    """Fields of `generation_config.json`; null means unset."""
    from whimbrel.inference import SamplingParams
    from whimbrel.model_io.weights import read_json

    if file is not None and not file.is_file():
        raise ConfigError(f"no generation config at {file}: expected a JSON file like generation_config.json")
    fields = {} if file is None else read_json(file)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling_options = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**sampling_options)  # type: ignore[arg-type]  # checks the values
    if temperature == 0:
        fields |= {"do_sample": False, **dict.fromkeys(options)}
    elif sampling_options:
        fields |= {"do_sample": True, **sampling_options}
    return fields | ({} if max_new_tokens is None else {"max_new_tokens": max_new_tokens})


def _card_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run for its model card, without local paths and without defaults in [train]."""
    from whimbrel.config import to_table
    from whimbrel.model_io.adapter import base_reference
    from whimbrel.model_io.hub import is_hub_id
    from whimbrel.train.config import TrainConfig

    defaults = to_table(TrainConfig(steps=1)) | {"device": settings.get("train", {}).get("device")}
    shown = {name: settings[name] for name in ("model", "train", "optim", "schedule") if name in settings}
    if "train" in shown:
        shown["train"] = {name: value for name, value in shown["train"].items() if defaults.get(name) != value}
    if "path" in shown.get("model", {}):
        reference, _ = base_reference(shown["model"]["path"])
        path = reference if reference is not None and is_hub_id(reference) else Path(shown["model"]["path"]).name
        shown["model"] = shown["model"] | {"path": path}
    return shown


def _held_out_evaluation(
    model: Path,
    base: Path | None,
    directory: Path | None,
    settings: dict[str, Any],
    data: str | None,
    max_tokens: int,
    *,
    is_push: bool,
) -> tuple[Callable[[GPT], HeldOutResult] | None, str | None]:
    """Evaluation on `data` or on the validation data of the run in `directory`; without either, a note that says so."""
    from whimbrel.data.shards import has_split
    from whimbrel.evaluate import held_out_evaluation
    from whimbrel.train.run_config import build_run_config
    from whimbrel.train.samples import SAMPLES

    if data is not None:
        return held_out_evaluation(model, data, base=base, max_tokens=max_tokens), None
    if directory is not None and (directory / SAMPLES).is_dir():  # a fine-tuning run
        samples = directory / SAMPLES / "val"
        if samples.is_dir():
            return held_out_evaluation(model, str(samples), base=base, max_tokens=max_tokens), None
        remedy = FINALIZE_FIRST if is_push else "pass chats or text with --data"
        return None, f"held-out loss not measured (the run has no validation samples): {remedy}"
    run = build_run_config(settings) if "data" in settings else None
    path = None if run is None else run.validation.path or run.data.shards
    if run is None or path is None or not has_split(path, "val"):
        where = "" if path is None else f" ({path} of the run has no validation shards)"
        remedy = FINALIZE_FIRST if is_push else "pass text or token shards with --data"
        return None, f"held-out loss not measured{where}: {remedy}"
    evaluate = held_out_evaluation(
        model,
        str(path),
        base=base,
        max_tokens=min(run.validation.tokens or max_tokens, max_tokens),
        sequence_length=run.sequence_length,
        mask_documents=run.data.documents != "join",
    )
    return evaluate, None


def _print_result(name: str, result: FinalizeResult) -> None:
    from whimbrel.base.files import format_bytes

    before, after = result.before, result.after
    sizes = f"{format_bytes(before.num_bytes)} -> {format_bytes(after.num_bytes)}"
    print(f"{name}: {result.num_parameters:,} parameters, {before.format} -> {after.format}, {sizes}")
    if before.held_out is not None and after.held_out is not None:
        old, new = before.held_out, after.held_out
        change = new.perplexity / old.perplexity - 1
        print(f"loss {old.loss:.4f} -> {new.loss:.4f}, on {old.num_tokens:,} tokens of {old.dataset}")
        print(f"perplexity {old.perplexity:.3f} -> {new.perplexity:.3f} ({change:+.2%})")


def push(
    source: Source,
    repo: Annotated[str, typer.Argument(help="Hub repository, as owner/name; created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch to upload to; created if it does not exist. (default: main)")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Which checkpoint of a run to use: latest, best or a step number. (default: latest)"),
    ] = None,
    merge: Merge = False,
    base: Base = None,
) -> None:
    """Upload a model to the Hugging Face Hub, with its tokenizer, chat template and a model card.

    A run is finalized first, as with `whimbrel finalize`, with the held-out loss in the model card. A directory
    written by `whimbrel finalize` is uploaded as is; to quantize a model, run `whimbrel finalize` first. A run with
    adapters becomes a PEFT repository, or a complete model with --merge. Optimizer state and logs are never uploaded.
    Log in with `hf auth login`, or set HF_TOKEN. Requires the `hub` extra.
    """
    from tempfile import TemporaryDirectory

    from whimbrel.model_io.finalize import MODEL_CARD, PUBLISHED
    from whimbrel.model_io.hub import check_write_access, is_hub_id, upload_model
    from whimbrel.model_io.locate import find_run
    from whimbrel.model_io.save import exportable_location

    if not is_hub_id(repo) or "@" in repo:
        raise ConfigError(f"expected the Hub model as owner/name, got '{repo}'")
    directory = exportable_location(source, base).directory
    check_write_access(repo)  # before the conversion and a long evaluation
    with TemporaryDirectory(prefix="whimbrel-") as folder:
        is_ready = find_run(source) is None and (directory / MODEL_CARD).is_file()
        if not is_ready or merge or base is not None or checkpoint is not None:
            directory = Path(folder) / "model"
            _finalize(source, directory, name=repo, checkpoint=checkpoint, merge=merge, base=base)
        _check_adapter_base(directory)
        url = upload_model(directory, PUBLISHED, repo, private=private, revision=revision)
    print(f"Pushed to {url}")


def _check_adapter_base(directory: Path) -> None:
    """Raise if the base model of the adapters in a directory is not on the Hub: others could not load them."""
    from whimbrel.model_io.adapter import ADAPTER_CONFIG
    from whimbrel.model_io.hub import is_hub_id
    from whimbrel.model_io.weights import read_json

    file = directory / ADAPTER_CONFIG
    name = read_json(file).get("base_model_name_or_path") if file.is_file() else None
    if file.is_file() and (name is None or not is_hub_id(name) or Path(name).exists()):
        raise ConfigError(
            f"the base model of these adapters is not on the Hub ({name}): push it and pass --base owner/name, or add "
            "--merge to push a complete model"
        )


def export(
    source: Source,
    out: Annotated[Path, typer.Argument(help="A new directory (hf), or a new file that ends in .gguf (gguf).")],
    output_format: Annotated[
        Literal["hf", "gguf"] | None,
        typer.Option("--format", help="Output format. (default: gguf if OUT ends in .gguf, else hf)"),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Dtype of the weights. (default: as stored)")
    ] = None,
    base: Base = None,
) -> None:
    """Export a model: a directory for `transformers` and vLLM, or a GGUF file for llama.cpp and Ollama.

    Quantized weights are dequantized, and adapters are merged. GGUF requires the `gguf` extra.
    """
    if output_format is not None and (output_format == "gguf") != (out.suffix == GGUF):
        raise ConfigError(
            f"--format {output_format} does not match {out}: a GGUF file name ends in {GGUF}, a directory name does not"
        )
    from whimbrel.config import suggest

    is_file_name = out.suffix.lower() in FILE_SUFFIXES or suggest(out.suffix.lower(), [GGUF]) is not None
    if output_format is None and out.suffix != GGUF and is_file_name:
        raise ConfigError(
            f"expected a directory, or a file name that ends in {GGUF}, got {out}: correct it, or add --format hf"
        )
    import torch

    from whimbrel.base.files import format_bytes

    torch_dtype = {None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    if out.suffix == GGUF:
        from whimbrel.model_io.gguf import export_gguf

        export_gguf(source, out, base=base, dtype=torch_dtype)
        size = out.stat().st_size
    else:
        from whimbrel.model_io import export_hf

        export_hf(source, out, base=base, dtype=torch_dtype)
        size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}{os.sep * out.is_dir()}: {format_bytes(size)}")
