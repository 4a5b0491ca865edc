"""A simulated device: tensors have shapes but no data, and a tracker counts the bytes they would take.

The code that runs on it is the code of a real step. torch treats the tensors as CPU tensors; where a GPU would run a
different kernel that changes what is allocated, `_GpuKernels` substitutes its memory footprint.
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
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from whimbrel.ops import cumulative_lengths, packed_attention
from whimbrel.ops.cross_entropy import fused_loss_and_gradient_

__all__ = ["MemoryTracker", "allocated_bytes", "simulated_device"]

ATEN = torch.ops.aten
DEVICE = torch.ops.prim.device.default
ALLOCATION_GRANULARITY = {"cuda": 512, "cpu": 64}
"""Allocator granularity in bytes: sizes are rounded up to a multiple of it."""


def allocated_bytes(nbytes: int, device_type: str) -> int:
    """What the allocator of a device takes for a tensor of `nbytes` bytes."""
    granularity = ALLOCATION_GRANULARITY.get(device_type, 1)
    return -(-nbytes // granularity) * granularity


@contextlib.contextmanager
def simulated_device(device_type: str) -> Iterator[MemoryTracker]:
    """Create all tensors without data, as if on a device of this type, and count them in the tracker."""
    tracker = MemoryTracker(device_type)
    with contextlib.ExitStack() as stack:
        if device_type == "cuda":
            stack.enter_context(_GpuKernels())
        # Fake CPU tensors, even for a GPU: autograd in a CPU-only build does not support fake CUDA tensors.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(tracker)
        yield tracker


@runtime_checkable
class CompositeTensor(Protocol):
    """A tensor subclass that stores its data in other tensors, such as codes and scales."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The attribute names of the inner tensors, and further metadata."""


class MemoryTracker(TorchDispatchMode):
    """Counts the live bytes of a device by category, and records the peak.

    New tensors are counted in the current category until `mark` moves them. Scalars computed from constants, such
    as step counts, get real values because control flow may depend on them; any other scalar reads as 1.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.category = "activations"
        self.live: Counter[str] = Counter()
        self.max: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.phase = ""
        self.profile: dict[tuple[str, int], int] = {}
        """Maximum of activations (and temporaries), by phase and bytes of live gradients."""
        self._device = device
        self._storages: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._scalars: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch does not wrap every call in torch._dynamo.disable, which would slow it down."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors and count its outputs."""
        if any(issubclass(kind, CompositeTensor) for kind in types):
            return NotImplemented  # the subclass dispatches to its inner tensors, which are tracked here
        if func is DEVICE:
            return args[0].fake_device  # the most frequent call by far
        kwargs = kwargs or {}
        if func is ATEN._local_scalar_dense.default:
            with torch._C._DisableTorchDispatch():
                return self._scalars.get(args[0], torch.ones((), dtype=args[0].dtype)).item()
        if func is ATEN.add.Tensor and _accumulates_gradients(*args[:2]):
            func = ATEN.add_.Tensor
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._count(tensor)
        if func in WORKSPACE.get(self._device, ()):
            self._update_peak(WORKSPACE[self._device][func](*args))
        self._compute_scalars(func, args, kwargs, tensors)
        return result

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Move tensors to another category."""
        for inner in (inner for tensor in tensors for inner in _inner_tensors(tensor)):
            self._count(inner)
            key = inner.untyped_storage()._cdata
            reference, before, size = self._storages[key]
            self._storages[key] = reference, category, size
            self._move(size, before, category)

    def on_event(self, event: str) -> None:
        """Switch categories at the training loop's events.

        What survives a micro-batch is a gradient (full or projected); what is allocated between on_pre_optimizer_step
        and on_optimizer_step belongs to the optimizer.
        """
        if event == "on_substep_end":
            for key, (reference, category, size) in self._storages.items():
                self._storages[key] = reference, "gradients" if category == "activations" else category, size
            self._move(self.live["activations"], "activations", "gradients")
            self.max["activations"] = 0  # measured in the last micro-batch, without the gradients
        self.category = "temporaries" if event == "on_pre_optimizer_step" else "activations"

    def reset_peak(self) -> None:
        """Reset the maxima to the current usage, like torch.cuda.reset_peak_memory_stats."""
        self.max, self.at_peak, self.peak = Counter(self.live), Counter(self.live), self.live.total()
        self.profile = {}

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = allocated_bytes(storage.nbytes(), self._device)
        self._storages[key] = weakref.ref(storage, lambda _: self._release(key)), self.category, size
        self.live[self.category] += size
        self.max[self.category] = max(self.max[self.category], self.live[self.category])
        self._update_peak(0)

    def _move(self, size: int, before: str, category: str) -> None:
        self.live[before] -= size
        self.live[category] += size
        self.max[category] = max(self.max[category], self.live[category])

    def _release(self, key: int) -> None:
        _, category, size = self._storages.pop(key)
        self.live[category] -= size

    def _update_peak(self, workspace: int) -> None:
        """`workspace`: bytes that a kernel allocates and frees while it runs."""
        total = self.live.total() + workspace
        backward = torch._C._current_autograd_node() is not None
        phase = "step" if self.category == "temporaries" else "backward" if backward else "forward"
        if total > self.peak:
            self.peak, self.at_peak, self.phase = total, Counter(self.live), phase
            self.at_peak[self.category] += workspace
        key = phase, self.live["gradients"]
        activations = self.live["activations"] + self.live["temporaries"] + workspace
        self.profile[key] = max(self.profile.get(key, 0), activations)

    def _compute_scalars(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        """Compute the values of scalar outputs if all inputs are scalars with known values."""
        if not all(tensor.ndim == 0 for tensor in outputs):
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = [self._scalars.get(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in inputs]
        if any(value is None or value.ndim for value in values):
            for tensor in outputs:
                self._scalars.pop(tensor, None)
            return
        with torch._C._DisableTorchDispatch():
            args, kwargs = tree_map_only(FakeTensor, self._scalars.__getitem__, (args, kwargs))
            numbers = tree_leaves(func(*args, **kwargs))
        for tensor, number in zip(outputs, numbers, strict=False):
            self._scalars[tensor] = number


def _inner_tensors(tensor: Tensor) -> list[Tensor]:
    if isinstance(tensor, CompositeTensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]


def _accumulates_gradients(a: Any, b: Any) -> bool:
    """Whether autograd is adding two gradients of the same tensor, which it does in place for ordinary tensors.

    The engine adds the gradients of several uses of a tensor between two nodes, while the node that produced the last
    one is still current. The C++ nodes themselves hardly ever add two tensors of the same shape; Python
    functions (BackwardCFunction) and AccumulateGrad may, so an add under them is not taken for the engine's.
    """
    node: Any = torch._C._current_autograd_node()
    is_node_op = node is None or isinstance(node, BackwardCFunction) or node.name().endswith("AccumulateGrad")
    return not is_node_op and not torch.is_grad_enabled() and isinstance(b, Tensor) and a.shape == b.shape


class _GpuKernels(TorchFunctionMode):
    """Makes code take its GPU path (`tensor.is_cuda`), and replaces GPU kernels by their memory footprint."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, or its substitute."""
        kwargs = kwargs or {}
        if func == IS_CUDA:
            return True
        if func is Tensor.backward:
            # A mode is disabled inside the function that it handles, but what runs in backward, such as recomputation
            # and optimizers in backward, must see it too. So the engine, which is not overridable, is called directly.
            (loss,) = args
            with self:
                return _engine_run_backward((loss,), (torch.ones_like(loss),), *BACKWARD, **BACKWARD_OPTIONS)
        return GPU_KERNELS.get(func, func)(*args, **kwargs)


class _FusedRMSNorm(torch.autograd.Function):
    """Memory footprint of fused RMSNorm: saves its input and one scalar per row for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    del shape, eps
    return cast(Tensor, _FusedRMSNorm.apply(x, weight))  # type: ignore[no-untyped-call]


def _attention(query: Tensor, *args: Any, **settings: Any) -> Tensor:
    """In fp32 with grouped heads a GPU has only the math kernel, which materializes all scores."""
    fp32 = query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    with sdpa_kernel(SDPBackend.MATH) if fp32 and settings.get("enable_gqa") else contextlib.nullcontext():
        return F.scaled_dot_product_attention(query, *args, **settings)


def _packed_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Saves the same tensors for backward as causal attention without documents."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def _cumulative_lengths(documents: Tensor) -> Tensor:
    """A stand-in: the size of the result is negligible."""
    return torch.empty(documents.shape[0] + 1, dtype=torch.int32, device=documents.device)


def _loss_and_gradient_(logits: Tensor, *_: Any) -> Tensor:
    """The fused kernel works in place on the logits and returns one loss per row."""
    return torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)


BACKWARD = (False, False, ())  # retain_graph, create_graph, inputs
BACKWARD_OPTIONS = {"allow_unreachable": True, "accumulate_grad": True}
IS_CUDA = cast(Any, Tensor.is_cuda).__get__
GPU_KERNELS: dict[Any, Callable[..., Tensor]] = {
    F.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attention,
    packed_attention: _packed_attention,
    cumulative_lengths: _cumulative_lengths,
    fused_loss_and_gradient_: _loss_and_gradient_,
}
"""Functions whose GPU kernels allocate or save different tensors than their CPU kernels."""


def _attention_backward(grad: Tensor, query: Tensor, *rest: Any) -> int:
    """The gradient of the queries is accumulated in fp32, with one number per row."""
    del grad, rest
    return 4 * query.numel() + 4 * query.numel() // query.shape[-1]


WORKSPACE: dict[str, dict[Any, Callable[..., int]]] = {
    "cuda": {ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward},
    "cpu": {ATEN.logsumexp.default: lambda x, *_: x.nbytes},
}
"""Bytes that a kernel allocates for itself while it runs, by device."""
