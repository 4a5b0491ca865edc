"""All errors that Whimbrel raises deliberately.

WhimbrelError
├── ConfigError(ValueError)          an invalid setting, flag or argument
│   └── MissingExtraError(ImportError)   a missing optional dependency
├── DataError(ValueError)            an invalid source, shard or manifest
├── CacheError(ValueError)           keys and values, or an operation, that a cache does not support
│   └── CacheIndexError(IndexError)      a layer or sequence that a cache does not have
├── CheckpointError(RuntimeError)    a damaged, incompatible or incomplete checkpoint or model directory
├── ParallelError(RuntimeError)      ranks that should agree but differ
├── PrecisionError(ValueError)       a precision recipe that this model or machine does not support
├── OptimizerError(ValueError)       an invalid optimizer setting or gradient
│   └── NoSparseGradientError(RuntimeError)   a sparse gradient, which most optimizers do not support
├── RequestError(ValueError)         an invalid generation or server request
├── TrainingError(RuntimeError)      a run that cannot continue (the loss is not finite)
└── WriteError(OSError)              a file that could not be written (a full disk)

A message is one line: what was expected, what was given, what to do. The command line prints it and exits with 2.
"""

from __future__ import annotations

__all__ = [
    "CacheError",
    "CacheIndexError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MissingExtraError",
    "NoSparseGradientError",
    "OptimizerError",
    "ParallelError",
    "PrecisionError",
    "RequestError",
    "TrainingError",
    "WhimbrelError",
    "WriteError",
]


class WhimbrelError(Exception):
    """Base class of all errors."""


class ConfigError(WhimbrelError, ValueError):
    """An invalid setting, flag or argument."""


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs the package '{package}': {self.install_command(extra)}")

    @staticmethod
    def install_command(extra: str) -> str:
        """How to install an extra, from a package index or from a clone."""
        return f"pip install 'whimbrel[{extra}]', or pip install '.[{extra}]' in a clone"


class DataError(WhimbrelError, ValueError):
    """An invalid source, shard or manifest."""


class CacheError(WhimbrelError, ValueError):
    """Keys and values, or an operation, that a cache does not support. The cache is unchanged."""


class CacheIndexError(CacheError, IndexError):
    """A layer or sequence that a cache does not have."""


class CheckpointError(WhimbrelError, RuntimeError):
    """A damaged, incompatible or incomplete checkpoint or model directory."""


class ParallelError(WhimbrelError, RuntimeError):
    """Ranks that should agree but differ."""


class PrecisionError(WhimbrelError, ValueError):
    """A precision recipe that this model or machine does not support."""


class OptimizerError(WhimbrelError, ValueError):
    """An invalid optimizer setting or gradient."""


class NoSparseGradientError(OptimizerError, RuntimeError):
    """Raised if an optimizer that needs dense gradients gets a sparse one."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(
            f"{optimizer} expected dense gradients, got a sparse one: create the embedding with sparse=False, or train "
            "it with torch.optim.SparseAdam"
        )


class RequestError(WhimbrelError, ValueError):
    """An invalid generation or server request; `field` is the invalid field of the request, if there is one."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class TrainingError(WhimbrelError, RuntimeError):
    """A run that cannot continue."""


class WriteError(WhimbrelError, OSError):
    """A file that could not be written. No partial file is left."""
