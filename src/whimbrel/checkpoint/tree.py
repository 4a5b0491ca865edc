"""Nested state (dicts, lists, tuples, numbers, texts, bytes, tensors) as named tensors plus plain JSON, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint.tensors import is_storable

__all__ = ["pack", "unpack"]


def pack(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Take the tensors out of `state`: what remains is JSON that says where each one goes.

    A tensor that occurs twice is taken once. Dicts come back as plain dicts and NumPy's numbers as Python's; all else
    comes back as it was, and what could not is refused.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def take(tensor: Tensor, path: str) -> dict[str, str]:
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or not is_storable(tensor):
            raise _refused(path, f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}")
        memory = tensor.untyped_storage().data_ptr()
        place = (memory, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() == 0 or place not in seen:
            while path in tensors:  # {"a/b": ...} beside {"a": {"b": ...}}, 1 beside "1"
                path += "'"
            seen[place] = path
            tensors[path] = tensor.detach()
        return {"tensor": seen[place]}

    def walk(node: Any, path: str) -> Any:
        match node:
            case Tensor():
                return take(node, path)
            case dict():
                if bad := [key for key in node if type(key) not in (str, int)]:
                    raise CheckpointError(f"state key {bad[0]!r} at '{path}' is neither a text nor a whole number")
                return {"dict": [[key, walk(value, _join(path, key))] for key, value in node.items()]}
            case list() | tuple() if type(node) in (list, tuple):
                return {type(node).__name__: [walk(value, _join(path, i)) for i, value in enumerate(node)]}
        return _leaf(node, path)

    return tensors, walk(state, "")


def unpack(tensors: dict[str, Tensor], tree: Any) -> Any:
    """The inverse of `pack`."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    match kind:
        case "tensor":
            return tensors[value]
        case "dict":
            return {key: unpack(tensors, node) for key, node in value}
        case "list":
            return [unpack(tensors, node) for node in value]
        case "tuple":
            return tuple(unpack(tensors, node) for node in value)
        case "bytes":
            return bytes.fromhex(value)
    raise CheckpointError(f"state holds a node of unknown kind '{kind}': it was written by a newer version")


def _leaf(node: Any, path: str) -> Any:
    if isinstance(node, np.generic):
        node = node.item()
    if type(node) is bytes:
        return {"bytes": node.hex()}
    if type(node) in (type(None), bool, int, float, str):
        return node
    raise _refused(path, type(node).__name__)


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _refused(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"state at '{path}' is a {what}: only numbers, texts, bytes, dense tensors, lists, tuples and dicts are saved"
    )
