"""The process of a command: ``penstock``, which is ``python -m penstock``.

On Linux one that computes begins anew with the memory that glibc hands out in huge pages: on CPUs XLA asks for its
temporaries at every call, and of a large model a fifth of the time goes into faulting them in by 4 KiB
(docs/decisions/023-huge-pages.md).
"""

import os
import platform
import sys
from pathlib import Path

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLE, _SINCE = "glibc.malloc.hugetlb", (2, 35)
_BEFORE = "_PENSTOCK_GLIBC_TUNABLES"
"""The environment's variable with what ``GLIBC_TUNABLES`` was before, which it is again for processes begun here."""
_COMPUTING = ("train", "eval", "generate", "serve", "replay", "why", "doctor")


def run() -> int:
    """`penstock.cli.main` of the process's own words.

    Returns:
        The exit code.
    """
    begin_with_huge_pages()
    from penstock.cli import main  # after what may begin the process anew

    return main()


def begin_with_huge_pages() -> None:
    """Begins this process anew where its command computes and Linux gives huge pages to those who ask.

    Not where they are given to all, or to none, nor where ``GLIBC_TUNABLES`` says anything of them.
    """
    before = os.environ.pop(_BEFORE, None)
    if before is not None:  # begun anew, and glibc has read it
        os.environ["GLIBC_TUNABLES"] = before
        if not before:
            del os.environ["GLIBC_TUNABLES"]
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.argv[1:2] and sys.argv[1] in _COMPUTING and _TUNABLE not in tunables and _given_on_request():
        asked = ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, os.environ | {_BEFORE: tunables, "GLIBC_TUNABLES": asked})


def _given_on_request() -> bool:
    """Whether Linux has huge pages for memory that is marked for them, and glibc can mark it."""
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < _SINCE:
        return False
    try:
        return "[madvise]" in _HUGE_PAGES.read_text("ascii")
    except OSError:  # a kernel without them, or a machine that shows no /sys
        return False


if __name__ == "__main__":
    sys.exit(run())
