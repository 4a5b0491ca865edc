"""`prepare` on a ray cluster: every file is a task that reads and encodes it wherever there is a free core.

The results come back in order and go through the same writer, so the shards are the same bytes. Source files must have
the same path on every machine. Needs the extra `ray`.
"""

from __future__ import annotations

import importlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from whimbrel.base.errors import MissingExtraError, WhimbrelError
from whimbrel.data.encoding import BatchEncoder, Encoded
from whimbrel.data.manifest import ResumePoint, ShardSettings
from whimbrel.data.sources import Origin
from whimbrel.tokenization import Tokenizer

__all__ = ["encode_on_ray"]

AHEAD = 8
"""Encoded batches of one file that may wait to be written."""


def encode_on_ray(
    origins: Sequence[Origin], start: ResumePoint, encoder: BatchEncoder, settings: ShardSettings
) -> Iterator[tuple[ResumePoint, Encoded]]:
    """An engine on the ray cluster of this session, or one started on this machine; a file for each core at once."""
    try:
        ray: Any = importlib.import_module("ray")  # Any: its annotations are partial
    except ImportError as error:
        raise MissingExtraError("preparing on a cluster", "ray", "ray") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    task = ray.remote(_encode_origin).options(num_returns="streaming", _generator_backpressure_num_objects=AHEAD)
    tokenizer = ray.put((encoder.tokenizer.to_json(), encoder.tokenizer.eot_token))

    def submit(source: int) -> tuple[int, int, Any]:
        skip = start.batch if source == start.source else 0
        return source, skip, task.remote(origins[source], tokenizer, settings, skip)

    waiting = iter(range(start.source, len(origins)))
    cores = int(ray.cluster_resources().get("CPU", 1))
    running = deque(submit(source) for source in itertools.islice(waiting, cores))
    while running:
        source, skip, results = running.popleft()
        for number, reference in enumerate(results, skip + 1):
            try:
                encoded = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, WhimbrelError) else error) from error
            yield ResumePoint(source=source, batch=number), encoded
        running.extend(submit(source) for source in itertools.islice(waiting, 1))


def _encode_origin(origin: Origin, tokenizer: tuple[str, str], settings: ShardSettings, skip: int) -> Iterator[Encoded]:
    """What runs on the cluster: the transform of one file, from its batch `skip` on."""
    text, eot_token = tokenizer
    encoder = BatchEncoder(Tokenizer.from_json(text, eot_token), settings.val_share)
    for batch in origin.batches(settings.text_key, settings.separator, skip):
        yield encoder(batch)
