from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.distributed.pool import Pool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes for jobs on several ranks.

    They end with the module: process groups that something still refers to keep threads that wake up often.
    """
    pool = Pool(tmp_path_factory.mktemp("stores"))
    yield pool
    pool.close()
