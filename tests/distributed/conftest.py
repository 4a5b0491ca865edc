from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes for jobs on several ranks."""
    pool = Pool(tmp_path_factory.mktemp("stores"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool(workers: Pool) -> Iterator[Pool]:
    """Processes for jobs on several ranks, which are idle between test modules."""
    yield workers
    workers.release()
