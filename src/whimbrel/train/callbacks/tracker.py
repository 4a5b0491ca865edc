"""Experiment trackers: Weights & Biases, and trackio, which speaks its language."""

from __future__ import annotations

import importlib
import os
import uuid
from pathlib import Path
from typing import Any, Literal

from whimbrel.base.errors import MissingExtraError
from whimbrel.config import to_table
from whimbrel.train.callbacks.writer import LogWriter, Warnings
from whimbrel.train.log import number, plain

__all__ = ["TrackerCallback"]

PROJECT = "whimbrel"


class TrackerCallback(LogWriter):
    """Reports step metrics, evaluations and logs under `run_name`, or the name of the run directory.

    A run that goes on is the same run there: its id is in the checkpoint. Without an account nothing is sent:
    Weights & Biases then writes into the run directory, and trackio always keeps its own files.
    """

    def __init__(self, kind: Literal["trackio", "wandb"], project: str | None = None) -> None:
        try:
            self._module: Any = importlib.import_module(kind)
        except ImportError as error:
            raise MissingExtraError(f"logging to {kind}", kind, kind) from error
        self.name = f"TrackerCallback-{kind}"
        self._kind = kind
        self._project = project or os.environ.get(f"{kind.upper()}_PROJECT", PROJECT)
        self._id = uuid.uuid4().hex[:12]
        self._run: Any = None
        self._warnings = Warnings()

    def on_train_begin(self, **event: Any) -> None:
        """Open the run, or open it again."""
        self._held = None
        if event["state"].is_world_process_zero:
            config = event["trainer"].config
            self._run = self._open(Path(config.output_dir), config.log.run_name, to_table(config))

    def on_train_metrics(self, **event: Any) -> None:
        """The numbers of a step."""
        metrics = dict(event["metrics"])
        step = metrics.pop("step")
        self._log({f"train/{name}": value for name, value in metrics.items() if value is not False}, step)

    def on_evaluate(self, **event: Any) -> None:
        """The numbers of an evaluation."""
        self.release(event["metrics"])
        metrics = {f"eval/{name.removeprefix('eval_')}": value for name, value in event["metrics"].items()}
        self._log(metrics, event["state"].global_step)

    def write_log(self, logs: dict[str, Any], step: int) -> None:
        """Whatever else is logged."""
        self._log({f"log/{name}": value for name, value in logs.items()}, step)

    def on_train_end(self, **event: Any) -> None:
        """Send or write what is left."""
        del event
        self.release()
        run, self._run = self._run, None
        if run is not None:
            with self._warnings.instead_of(Exception, of=self._kind):
                run.finish()

    def state_dict(self) -> dict[str, Any]:
        """Which run it is."""
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be that run."""
        self._id = state["id"]

    def _open(self, output_dir: Path, name: str | None, settings: dict[str, Any]) -> Any:
        name = name or output_dir.name
        if self._kind == "trackio":
            unique = f"{name}-{self._id}"
            return self._module.init(project=self._project, name=unique, config=settings, resume="allow", embed=False)
        signed_in = self._module.api.api_key is not None
        run = self._module.init(
            project=self._project, name=name, id=self._id, resume="allow", config=settings,
            dir=str(output_dir), mode=os.environ.get("WANDB_MODE") or ("online" if signed_in else "offline"),
        )  # fmt: skip
        run.define_metric("*", step_metric="step")  # its own counter refuses to go back, and a resumed run does
        return run

    def _log(self, values: dict[str, Any], step: int) -> None:
        self.release()
        values = {name: plain(value) if number(value) is None else number(value) for name, value in values.items()}
        with self._warnings.instead_of(Exception, of=self._kind):
            if self._run is not None and self._kind == "trackio":
                self._run.log(values, step=step)
            elif self._run is not None:
                self._run.log({**values, "step": step})
