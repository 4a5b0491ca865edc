"""A device without memory: tensors on it have shapes alone, and a ledger counts the bytes that they would take.

Whatever runs inside is the code of a real step. Only what torch itself chooses by device is put right here: kernels
that keep more or less for backward than those of the CPU, where these tensors are for torch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["MemoryTracker", "simulated_device"]

ATEN = torch.ops.aten
DEVICE = torch.ops.prim.device.default
GRANULE = {"cuda": 512, "cpu": 64}
"""What a device's allocator rounds sizes up to."""


@contextlib.contextmanager
def simulated_device(kind: str) -> Iterator[MemoryTracker]:
    """Inside, every new tensor is one of shape alone, on a device of this kind, and counted in the ledger."""
    ledger = MemoryTracker(kind)
    with contextlib.ExitStack() as restore:
        if kind == "cuda":
            for name, kernel in GPU_KERNELS.items():
                restore.callback(setattr, F, name, getattr(F, name))
                setattr(F, name, kernel)  # a mode for functions would not be in force where backward computes again
        restore.enter_context(_Shapes(kind))
        restore.enter_context(ledger)
        yield ledger


@runtime_checkable
class Parted(Protocol):
    """A tensor that is made of others, such as codes and scales."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of those, and what else there is to know."""


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that the memory of one is in."""
    return (
        [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if isinstance(tensor, Parted) else [tensor]
    )


class MemoryTracker(TorchDispatchMode):
    """Counts the live bytes of a device by what they are for, and remembers when there were most.

    What is new counts as `kind` until `mark` calls it something else. Single numbers that follow from constants alone,
    such as the count of steps, are computed: what is done may hang on them. Any other that is asked for is 1.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = "activations"
        self.live: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.phase = ""
        self._device, self._granule = device, GRANULE.get(device, 1)
        self._held: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside: no need to guard each operation against it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes, and count what it makes."""
        if any(issubclass(kind, Parted) for kind in types):
            return NotImplemented  # a tensor of several, which works on those: they come here in turn
        if func is DEVICE:
            return args[0].fake_device  # asked for more often than all else together
        kwargs = kwargs or {}
        if func is ATEN._local_scalar_dense.default:
            with torch._C._DisableTorchDispatch():
                return self._numbers.get(args[0], torch.ones((), dtype=args[0].dtype)).item()
        if func is ATEN.add.Tensor and _sums_gradients(*args[:2]):
            func = ATEN.add_.Tensor
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._count(tensor)
        if func in SCRATCH.get(self._device, ()):
            self._measure(SCRATCH[self._device][func](*args))
        self._follow(func, args, kwargs, tensors)
        return result

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what these are for."""
        for tensor in (part for whole in tensors for part in parts_of(whole)):
            self._count(tensor)
            key = tensor.untyped_storage()._cdata
            reference, before, size = self._held[key]
            self._held[key] = reference, kind, size
            self._move(size, before, kind)

    def enter(self, event: str) -> None:
        """Hear of a step: what outlives a micro-batch are gradients, projected or not; what is new when weights are
        moved is the optimizer's own.
        """
        if event == "on_substep_end":
            for key, (reference, kind, size) in self._held.items():
                self._held[key] = reference, "gradients" if kind == "activations" else kind, size
            self._move(self.live["activations"], "activations", "gradients")
            self.most["activations"] = 0  # the last micro-batch shows them alone
        self.kind = "temporaries" if event == "on_pre_optimizer_step" else "activations"

    def forget(self) -> None:
        """Measure anew from what is live now."""
        self.most, self.at_peak, self.peak = Counter(self.live), Counter(self.live), self.live.total()

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        size = -(-storage.nbytes() // self._granule) * self._granule
        self._held[key] = weakref.ref(storage, lambda _: self._release(key)), self.kind, size
        self.live[self.kind] += size
        self.most[self.kind] = max(self.most[self.kind], self.live[self.kind])
        self._measure(0)

    def _move(self, size: int, before: str, kind: str) -> None:
        self.live[before] -= size
        self.live[kind] += size
        self.most[kind] = max(self.most[kind], self.live[kind])

    def _release(self, key: int) -> None:
        _, kind, size = self._held.pop(key)
        self.live[kind] -= size

    def _measure(self, scratch: int) -> None:
        """Take note of a new peak; `scratch` is what a kernel takes and gives back on its own."""
        total = self.live.total() + scratch
        if total > self.peak:
            self.peak, self.at_peak = total, Counter(self.live)
            self.at_peak[self.kind] += scratch
            backward = torch._C._current_autograd_node() is not None
            self.phase = "step" if self.kind == "temporaries" else "backward" if backward else "forward"

    def _follow(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        """Compute single numbers along, as long as all that they follow from is known."""
        if not all(tensor.ndim == 0 for tensor in made):
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = [self._numbers.get(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in inputs]
        if any(value is None or value.ndim for value in values):
            for tensor in made:
                self._numbers.pop(tensor, None)
            return
        with torch._C._DisableTorchDispatch():
            args, kwargs = tree_map_only(FakeTensor, self._numbers.__getitem__, (args, kwargs))
            numbers = tree_leaves(func(*args, **kwargs))
        for tensor, number in zip(made, numbers, strict=False):
            self._numbers[tensor] = number


def _sums_gradients(one: Any, other: Any) -> bool:
    """Whether autograd adds two gradients of one tensor: in place, but for tensors that are not torch's plain ones."""
    node: Any = torch._C._current_autograd_node()
    inside = node is None or isinstance(node, BackwardCFunction) or node.name().endswith("AccumulateGrad")
    return not inside and not torch.is_grad_enabled() and isinstance(other, Tensor) and one.shape == other.shape


class _Shapes(FakeTensorMode):
    """Tensors of shape alone, on the CPU for torch: a build without CUDA makes no gradients of tensors on a GPU."""

    def __init__(self, stands_for: str) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.stands_for = stands_for


class _FusedNorm(torch.autograd.Function):
    """RMSNorm in one kernel: keeps its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _fused_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    del shape, eps
    return cast(Tensor, _FusedNorm.apply(x, weight))  # type: ignore[no-untyped-call]


def _attention(query: Tensor, *args: Any, **settings: Any) -> Tensor:
    """In fp32 a GPU has but the plain kernel for grouped heads, which keeps all scores."""
    single = query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    with sdpa_kernel(SDPBackend.MATH) if single and settings.get("enable_gqa") else contextlib.nullcontext():
        return ATTENTION(query, *args, **settings)


ATTENTION = F.scaled_dot_product_attention
GPU_KERNELS = {"rms_norm": _fused_norm, "scaled_dot_product_attention": _attention}
"""Functions whose kernels on a GPU keep something else for backward than those of the CPU."""


def _attention_backward(grad: Tensor, query: Tensor, *rest: Any) -> int:
    """The gradient of queries is summed up in fp32, beside one number for each row."""
    del grad, rest
    return 4 * query.numel() + 4 * query.numel() // query.shape[-1]


SCRATCH: dict[str, dict[Any, Callable[..., int]]] = {
    "cuda": {ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward},
    "cpu": {ATEN.logsumexp.default: lambda x, *_: x.nbytes},
}
"""Bytes that a kernel takes for itself while it runs, by device."""
