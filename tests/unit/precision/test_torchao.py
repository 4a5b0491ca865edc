"""torchao is imported lazily and quietly, and reported if missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from torch import nn

from whimbrel.base.errors import MissingExtraError
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import finalize, prepare, recipe_names

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package 'torchao'")
QUIET = """
import logging, warnings
warnings.simplefilter("error")
filters = list(warnings.filters)
import torch, torch._dynamo.config as dynamo, torch._inductor.config as inductor
from torch import nn
from whimbrel.precision import prepare
import sys
assert "torchao" not in sys.modules
before = dynamo.get_config_copy(), inductor.get_config_copy()
level = logging.getLogger("torchao").level
net = nn.Sequential(nn.Linear(128, 128))
prepare(net, RECIPE)
net(torch.ones(2, 128)).sum().backward()
assert "torchao" in sys.modules
assert (dynamo.get_config_copy(), inductor.get_config_copy()) == before
assert logging.getLogger("torchao").level == level
"""


@needs_torchao
@pytest.mark.parametrize("name", ["int8-dynamic-act-int4-weight", "tensorwise"])
def test_torchao_is_imported_lazily_and_quietly(name: str) -> None:
    script = QUIET.replace("RECIPE", repr(name))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "is emulated on a CPU" not in line]
    assert said == []


@pytest.mark.parametrize("name", [*recipe_names("fp8")[:3], *recipe_names("qat")])
def test_a_missing_torchao_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    gpt = GPT(GPTConfig(vocab_size=64, context_length=16, num_layers=1, embd_size=128, num_heads=2))
    with pytest.raises(
        MissingExtraError, match=rf"= {name} needs the package 'torchao': pip install 'whimbrel\[lowbit\]'"
    ):
        prepare(gpt, name)
    assert type(gpt.get_submodule("transformer.h.0.mlp.c_fc")) is nn.Linear
    assert finalize(gpt, name) is gpt
