"""Work on many arrays with several threads, where the arrays are large enough to repay them."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

THREADS = min(4, os.cpu_count() or 1)
_WORTHWHILE_BYTES = 8 * 1024 * 1024


def in_parallel(work: Callable[[_Item], _Result], items: Iterable[_Item], nbytes: int) -> list[_Result]:
    """The results in the items' order.

    Args:
        work: Gives the interpreter up while it reckons.
        items: What it is called with.
        nbytes: How much is worked on in all.
    """
    if nbytes < _WORTHWHILE_BYTES or THREADS == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as pool:
        return list(pool.map(work, items))
