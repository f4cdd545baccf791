"""`benchmarks.full_width`, but for the measuring, which takes minutes and gigabytes."""

import pytest

from benchmarks.full_width import MOST, check_peak


def test_more_memory_than_a_process_may_take_is_a_failure():
    check_peak(MOST)
    with pytest.raises(SystemExit, match=r"^the most memory of any process is 18,000,000,001 bytes; expected at most"):
        check_peak(MOST + 1)
