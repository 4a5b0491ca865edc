"""Nested state (dicts, lists, tuples, numbers, texts, tensors) as named tensors plus plain JSON, and back, exactly."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whimbrel.base.errors import CheckpointError

__all__ = ["pack", "unpack"]


def pack(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Take the tensors out of `state`: what remains is JSON that says where each one goes."""
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        match node:
            case Tensor():
                tensors[path] = node.detach()
                return {"tensor": path}
            case dict():
                if bad := [key for key in node if not isinstance(key, str | int)]:
                    raise CheckpointError(f"state key {bad[0]!r} at '{path}' is neither a text nor a whole number")
                return {
                    "dict": [[key, walk(value, f"{path}/{key}" if path else str(key))] for key, value in node.items()]
                }
            case list() | tuple():
                return {type(node).__name__: [walk(value, f"{path}/{i}") for i, value in enumerate(node)]}
            case None | bool() | int() | float() | str():
                return node
        raise CheckpointError(
            f"state at '{path}' is a {type(node).__name__}: only numbers, texts, tensors, lists and dicts are saved"
        )

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
    raise CheckpointError(f"state holds a node of unknown kind '{kind}': it was written by a newer version")
