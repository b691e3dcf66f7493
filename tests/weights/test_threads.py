import threading

import pytest

from penstock.weights import threads
from penstock.weights.threads import in_parallel


@pytest.mark.parametrize("nbytes", [0, 1 << 30])
def test_results_keep_the_order_of_the_items(nbytes: int):
    assert in_parallel(lambda item: item * item, range(50), nbytes) == [item * item for item in range(50)]


def test_small_work_stays_in_its_thread_and_large_work_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "THREADS", 2)
    here = threading.get_ident()
    assert set(in_parallel(lambda _: threading.get_ident(), range(4), 1000)) == {here}
    assert here not in in_parallel(lambda _: threading.get_ident(), range(4), 1 << 30)


def test_an_error_comes_through():
    with pytest.raises(ZeroDivisionError):
        in_parallel(lambda item: 1 // item, [1, 0], 1 << 30)
