"""Parameters that are allocated after the model is split: no rank ever holds the complete model.

`deferred_init` runs the code that creates a model. Its parameters stay on the meta device, and the operations that
initialize them are recorded, random ones with the state of their generator. `materialize_` allocates what this rank has
of each parameter and repeats the operations, one parameter at a time, on the host: every element gets the value that it
has in a single process.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.state import copy_full_, row_orders

__all__ = ["defer_loading", "deferred_init", "digests", "materialize_", "move_"]

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
aten, HOST, META = torch.ops.aten, torch.device("cpu"), torch.device("meta")
COPIES = (aten._to_copy.default, aten.clone.default)
EMPTY = (aten.empty_like.default, aten.new_empty.default)
OVERWRITES = (
    aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default,
    aten.zero_.default,
)  # fmt: skip
"""Operations whose result does not depend on what was there before."""


class Write(NamedTuple):
    """An operation in place; `generator` is the state before it of the generator that it uses."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: Tensor | None


@dataclass(frozen=True)
class Snapshot:
    """A view of a deferred tensor after the operations so far."""

    meta: Tensor
    writes: tuple[Write, ...]

    def compute(self) -> Tensor:
        """The values, in newly allocated memory."""
        flat = torch.empty(self.meta.untyped_storage().nbytes() // self.meta.itemsize, dtype=self.meta.dtype)
        for write in self.writes:
            target, *others = tree_map_only(Snapshot, Snapshot.compute, write.args)
            kwargs = write.kwargs
            if write.generator is not None:
                kwargs = kwargs | {"generator": torch.Generator().set_state(write.generator)}
            write.func(flat.as_strided(target.shape, target.stride(), target.storage_offset()), *others, **kwargs)
        return flat.as_strided(self.meta.shape, self.meta.stride(), self.meta.storage_offset())

    def digest(self) -> str:
        """Equal for equal operations, which lead to equal values."""
        found = hashlib.sha256(f"{self.meta.dtype} {self.meta.shape} {self.meta.stride()}".encode())
        for func, (target, *others), kwargs, generator in self.writes:
            found.update(f"{func} {target.shape} {target.stride()} {target.storage_offset()}".encode())
            for item in tree_leaves((others, kwargs, generator)):
                if isinstance(item, Tensor):
                    found.update(item.flatten().view(torch.uint8).numpy().tobytes())
                else:
                    found.update((item.digest() if isinstance(item, Snapshot) else str(item)).encode())
        return found.hexdigest()


class Recorder(TorchDispatchMode):
    """Creates what `torch.empty` returns on the meta device, and records the operations on it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, tuple[Write, ...]] = {}
        """By storage: the operations on it."""
        self._created: dict[int, Tensor] = {}
        """The tensor that each was created for."""

    def snapshot(self, tensor: Any) -> Snapshot | None:
        """A tensor as it is now; None if it is not deferred."""
        if type(tensor) not in (Tensor, nn.Parameter):
            return None
        key = tensor.untyped_storage()._cdata
        if key not in self._writes:
            return None
        if tensor.dtype != self._created[key].dtype:
            raise RuntimeError(f"{tensor.dtype} values of {self._created[key].dtype} memory")
        return Snapshot(tensor.detach(), self._writes[key])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation on deferred tensors, compute one whose result depends on their values, or run others."""
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is aten.empty.memory_format and device in (None, HOST):
            return self._defer(func(*args, **kwargs | {"device": META}))
        deferred = [arg for arg in tree_leaves((args, kwargs)) if self.snapshot(arg) is not None]
        if not deferred or func.is_view:
            return func(*args, **kwargs)
        if func in (*COPIES, *EMPTY) and device in (None, HOST, META):
            created = self._defer(func(*args, **kwargs | ({} if device is None else {"device": META})))
            if func in COPIES:
                self._write(aten.copy_.default, (created, args[0]), {})
            return created
        written = [
            args[index] if index < len(args) else kwargs.get(argument.name)
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(self.snapshot(arg) is not None for arg in tree_leaves(written)):
            is_list = not isinstance(args[0], Tensor)
            if is_list or written[1:] or written[0] is not args[0] or torch.Tag.inplace_view in func.tags:
                raise RuntimeError(f"{func} is not supported on parameters that are not allocated yet")
            self._write(func, args, kwargs)
            return args[0]
        args, kwargs = tree_map_only(Tensor, self._computed, (args, kwargs))
        return func(*args, **kwargs)

    def _defer(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        self._writes[key], self._created[key] = (), tensor
        return tensor

    def _write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        target, *others = args
        others = tree_map_only(Tensor, lambda tensor: self.snapshot(tensor) or tensor.clone(), others)
        generator, state = kwargs.get("generator") or torch.default_generator, None
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = generator.get_state()  # then draw the numbers, as the next operation continues after them
            scratch = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
            func(scratch, *tree_map_only(Snapshot, Snapshot.compute, others), **kwargs, generator=generator)
        write = Write(func, (target.detach(), *others), kwargs, state)
        storage = target.untyped_storage()
        covers = func in OVERWRITES and target.nbytes == storage.nbytes()
        self._writes[storage._cdata] = (write,) if covers else (*self._writes[storage._cdata], write)

    def _computed(self, tensor: Tensor) -> Tensor:
        snapshot = self.snapshot(tensor)
        return tensor if snapshot is None else snapshot.compute()


class OnHost(TorchFunctionMode):
    """Reports deferred tensors as being on the host: some functions of `nn.init` skip those on the meta device."""

    GETTERS: ClassVar = {"device": HOST, "is_cpu": True, "is_meta": False}

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer queries of the device, and leave a deferred tensor that is moved to the host as it is."""
        kwargs = kwargs or {}
        if args and self._recorder.snapshot(args[0]) is not None:
            for name, value in self.GETTERS.items():
                if func == getattr(Tensor, name).__get__:
                    return value
            if func is Tensor.cpu:
                return args[0]
            if func is Tensor.to:
                stays = (META if isinstance(arg, str | torch.device) and arg in ("cpu", HOST) else arg for arg in args)
                args, device = tuple(stays), kwargs.get("device")
                kwargs = kwargs | ({"device": META} if device in ("cpu", HOST) else {})
        return func(*args, **kwargs)


Load = Callable[[nn.Module], None]
_loaders: weakref.WeakKeyDictionary[nn.Module, Load] = weakref.WeakKeyDictionary()
_digests: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


def deferred_init(create: Callable[[], Model]) -> Model:
    """The model that `create` returns, with parameters on the meta device until `materialize_`.

    Parameters that do not come from `torch.empty` are complete, and so are all buffers. `create` seeds the generators,
    since it is called again, for a complete model, if it does something that cannot be deferred.
    """
    try:
        recorder = Recorder()
        with recorder, OnHost(recorder):
            model = create()
    except RuntimeError as error:
        logger.warning(
            "creating the complete model on every rank, because its initialization cannot be deferred: %s", error
        )
        return create()
    snapshots = {name: recorder.snapshot(parameter) for name, parameter in model.named_parameters()}
    parameters = {name: snapshot for name, snapshot in snapshots.items() if snapshot is not None}
    for name in (name for name, snapshot in parameters.items() if not snapshot.writes):
        raise ConfigError(f"expected a model with initialized parameters, got no values for {name}: initialize it")
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for name, tensor in list(table.items()):
                if (snapshot := recorder.snapshot(tensor)) is not None:
                    table[name] = snapshot.compute()
    if parameters:
        defer_loading(model, partial(_initialize, snapshots=parameters))
        _digests[model] = {name: snapshot.digest() for name, snapshot in parameters.items()}
    return model


def defer_loading(model: nn.Module, load: Load) -> None:
    """Let `materialize_` call `load`, which fills the parameters of a model on the meta device."""
    _loaders[model] = load


def digests(model: nn.Module) -> Mapping[str, str]:
    """What determines the initial values of each deferred parameter."""
    return _digests.get(model, {})


def move_(module: nn.Module, device: torch.device) -> None:
    """Like `module.to(device)`, but tensors on the meta device stay there."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


@torch.no_grad()
def materialize_(model: nn.Module, stages: Sequence[nn.Module], device: torch.device) -> None:
    """Allocate and fill the parameters of `stages`: the model, or the parts of it that this rank has."""
    load = _loaders.pop(model, None)
    if load is None:
        return
    for parameter in (parameter for stage in stages for parameter in stage.parameters() if parameter.is_meta):
        allocated = nn.Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
        vars(allocated).update(vars(parameter))
        torch.utils.swap_tensors(parameter, allocated)
    load(model)
    for stage in stages:
        stage._apply(lambda tensor: tensor)  # FSDP2 pads the new shards


def _initialize(model: nn.Module, snapshots: Mapping[str, Snapshot]) -> None:
    orders = row_orders(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in snapshots and not parameter.is_meta:
            copy_full_(parameter, snapshots[name].compute(), orders.get(name))
