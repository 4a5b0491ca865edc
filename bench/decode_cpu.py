"""Tokens per second on a CPU, compared with llama.cpp in the same run, on the same random weights.

    python bench/decode_cpu.py --llama-cpp .venv/llama.cpp --out bench/results/decode-cpu-llama-cpp.json

The shape is a preset (SmolLM2 135M) with the vocabulary of the GPT-2 tokenizer. For each number of threads, formats and
contenders are interleaved; a figure is the median of the rounds. Ours is `LLM.stream`, theirs node-llama-cpp's
`evaluate` (llama.cpp in its prebuilt version for this CPU); both sample greedily. int8 is compared with Q8_0 and int4
with Q4_1; embedding and head are quantized on both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch

import whimbrel
from record import record
from timing import init_model
from whimbrel.inference import LLM, SamplingParams
from whimbrel.model_io.gguf import export_gguf
from whimbrel.models import GPT, GPTConfig, preset
from whimbrel.precision import quantize_

FORMATS = {"fp32": "F32", "bf16": "F16", "fp16": "F16", "int8": "Q8_0", "int4": "Q4_1"}
"""Our formats, and what each is compared with."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
Timing = tuple[float, float]
"""Seconds until the first new token, and for the ones after it."""
Contender = Callable[[list[int], int], Timing]


def our_model(config: GPTConfig, weight_format: str) -> GPT:
    """Random weights, the same in every format."""
    model = init_model(config, torch.device("cpu"), torch.float32).eval()
    model.to(DTYPES.get(weight_format, torch.bfloat16))
    if weight_format in ("int8", "int4"):
        quantize_(model, weight_format, embeddings=True)
    return model


def ours(model: GPT) -> Contender:
    """`LLM.stream_tokens`."""
    llm = LLM(model, max_batch=1, prefix_cache=False)

    def run(prompt: list[int], count: int) -> Timing:
        start = time.perf_counter()
        tokens = llm.stream_tokens(prompt, SamplingParams(temperature=0), max_new_tokens=count, ignore_eos=True)
        next(tokens)
        first = time.perf_counter()
        assert len(list(tokens)) == count - 1
        return first - start, time.perf_counter() - first

    return run


@contextmanager
def llama_cpp(folder: Path) -> Iterator[Callable[[Path, int], Contender]]:
    """A function that returns the contender for a GGUF file and a number of threads."""
    script = Path(__file__).with_name("llama_cpp.mjs")
    with subprocess.Popen(
        ["node", str(script), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def contender(model: Path, threads: int) -> Contender:
            def run(prompt: list[int], count: int) -> Timing:
                request = {"model": str(model), "threads": threads, "prompt": prompt, "count": count}
                print(json.dumps(request), file=stdin, flush=True)
                answer = json.loads(stdout.readline())
                return answer["prompt_seconds"], answer["seconds"]

            return run

        yield contender
        stdin.close()


def write_gguf_files(config: GPTConfig, folder: Path) -> dict[str, Path]:
    """The model as GGUF files, by type."""
    tokenizer = whimbrel.load_tokenizer("gpt2")
    whimbrel.save_model(our_model(config, "fp32"), folder / "model", tokenizer)
    files = {name: folder / f"{name}.gguf" for name in set(FORMATS.values())}
    for name, dtype in (("F32", torch.float32), ("F16", torch.float16)):
        export_gguf(folder / "model", files[name], dtype=dtype)
    for name in ("Q8_0", "Q4_1"):
        quantize_gguf(files["F32"], files[name], gguf.GGMLQuantizationType[name])
    return files


def quantize_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Copy a file with all its matrices quantized."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None
    writer = gguf.GGUFWriter(target, architecture.contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], item_type)
    for tensor in reader.tensors:
        if len(tensor.shape) == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(tensor.data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(contenders: dict[str, Contender], args: argparse.Namespace, config: GPTConfig) -> dict[str, Any]:
    """Tokens per second of each contender: median of interleaved rounds, after one of each to warm up."""
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[Timing]] = {name: [] for name in contenders}
    for index in range(args.rounds + 1):
        prompt: list[int] = torch.randint(0, config.vocab_size, (args.prompt,), generator=generator).tolist()
        for name, run in contenders.items():
            timing = run(prompt, args.new)
            if index:
                seconds[name].append(timing)
    return {
        name: {
            "prompt_tokens_per_second": args.prompt / median(prompt for prompt, _ in timings),
            "tokens_per_second": (args.new - 1) / median(new for _, new in timings),
            "seconds": timings,
        }
        for name, timings in seconds.items()
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, help="directory of scripts/install-llama-cpp")
    parser.add_argument("--model", default="smollm2-135m", help="a preset")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = replace(preset(args.model), vocab_size=whimbrel.load_tokenizer("gpt2").vocab_size)
    results: dict[str, Any] = {"model": args.model, "prompt": args.prompt, "new": args.new, "threads": {}}
    with TemporaryDirectory() as folder:
        files = write_gguf_files(config, Path(folder)) if args.llama_cpp else {}
        for threads in args.threads:
            torch.set_num_threads(threads)
            rows = results["threads"][threads] = {}
            for name in args.formats:
                contenders = {"whimbrel": ours(our_model(config, name))}
                if not args.llama_cpp:
                    rows[name] = measure(contenders, args, config)
                    continue
                with llama_cpp(args.llama_cpp) as contender:
                    contenders["llama.cpp"] = contender(files[FORMATS[name]], threads)
                    rows[name] = measure(contenders, args, config)
            for name, row in rows.items():
                print_row(f"{threads} threads, {name} / {FORMATS[name]}", row)
    record("decode-cpu-llama-cpp", results, args.out)


def print_row(title: str, row: dict[str, Any]) -> None:
    """Print the speeds of one format, and their ratio."""
    cells = []
    for key, unit in (("tokens_per_second", "decode"), ("prompt_tokens_per_second", "prompt")):
        speeds = [each[key] for each in row.values()]
        ratio = f" ({speeds[0] / speeds[1]:.2f}x)" if len(speeds) > 1 else ""
        cells.append(f"{unit} {' / '.join(f'{speed:.1f}' for speed in speeds)} tokens/s{ratio}")
    print(f"{title}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
