"""A run of the Python API for random_kills.py, with gradient accumulation and dropout, which uses the RNG."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whimbrel.train import Trainer, TrainingArguments

STEPS, EVERY = 60, 4


class Net(nn.Module):
    """A classifier with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.layers(x)


def main() -> None:
    """Start or resume the run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
    data = [{"x": row, "labels": int(row[:4].argmax())} for row in rows]
    args = TrainingArguments(
        output_dir="run", max_steps=STEPS, save_steps=EVERY, save_total_limit=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=3, learning_rate=1e-2, logging_steps=5, eval_strategy="steps", eval_steps=7,
        use_cpu=True, resume_from_checkpoint="latest",
    )  # fmt: skip
    Trainer(args, Net(), train_dataset=data, eval_dataset=data[:20]).train()


if __name__ == "__main__":
    main()
