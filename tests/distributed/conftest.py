from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes for jobs on several ranks."""
    pool = Pool(tmp_path_factory.mktemp("stores"))
    yield pool
    pool.close()
