from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.distributed.pool import Pool


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sum in this process in the order of the pool's processes, which have one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes for jobs on several ranks.

    They end with the module: process groups that something still refers to keep threads that wake up often.
    """
    pool = Pool(tmp_path_factory.mktemp("stores"))
    yield pool
    pool.close()
