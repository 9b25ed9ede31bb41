"""One thread and one seed, so that figures repeat and neighbours are left alone."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_repeatable_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(2017)
    yield
    torch.set_num_threads(threads)
