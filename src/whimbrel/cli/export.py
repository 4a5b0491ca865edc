"""`whimbrel export SOURCE OUT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from whimbrel.base.errors import ConfigError

__all__ = ["export"]

GGUF = ".gguf"


def export(
    source: Annotated[Path, typer.Argument(help="A run (its newest checkpoint), a checkpoint, or a model directory.")],
    out: Annotated[Path, typer.Argument(help="A new directory (hf), or a new file that ends in .gguf (gguf).")],
    form: Annotated[
        Literal["hf", "gguf"] | None,
        typer.Option("--format", help="(default: gguf if OUT ends in .gguf, else hf)"),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Dtype of the weights. (default: as stored)")
    ] = None,
) -> None:
    """Export a model: a directory for `transformers` and vLLM, or a GGUF file for llama.cpp and Ollama.

    Quantized weights are dequantized. GGUF needs the extra `gguf`.
    """
    if form is not None and (form == "gguf") != (out.suffix == GGUF):
        raise ConfigError(
            f"--format {form} does not match {out}: a GGUF file name ends in {GGUF}, a directory name does not"
        )
    import torch

    from whimbrel.base.progress import format_bytes

    torch_dtype = {None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    if out.suffix == GGUF:
        from whimbrel.model_io.gguf import export_gguf

        export_gguf(source, out, dtype=torch_dtype)
        size = out.stat().st_size
    else:
        from whimbrel.model_io import export_hf

        export_hf(source, out, dtype=torch_dtype)
        size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {format_bytes(size)}")
