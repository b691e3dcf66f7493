"""Which URLs and paths a run's Parquet files may have; loads nothing, so that configs can ask."""

import re
from pathlib import Path

PROTOCOLS = ("file", "local", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
"""Where a run may have its Parquet files: here, or in object stores whose addresses come from the environment of
whoever looks, and not from a URL that somebody wrote into a file."""


def url_problem(url: str) -> str | None:
    """What is wrong with a URL or path as the place of a run's Parquet files, as the rest of a sentence; None: nothing.

    A URL may neither name a server nor hold credentials: whoever looks at a run would connect to the one, and everybody
    who can read its directory has the other.
    """
    protocol, separator, path = url.partition("://")
    if not separator:
        return None
    if "@" in path.partition("/")[0] or "@" in protocol:
        return f"is {shown_url(url)!r}: name no user, password or account there; the environment has the credentials"
    if "::" in url or "?" in url:
        return f"is {url!r}: write a plain URL, without '::' and '?'"
    if protocol not in PROTOCOLS:
        return f"is {url!r}: give a path, or a URL that begins with {', '.join(PROTOCOLS)}"
    return None


def shown_url(url: str) -> str:
    """A URL for people: without the name and password that it may hold."""
    return re.sub(r"(://)[^/]*@", r"\1***@", url)


def is_remote(url: str | None) -> bool:
    """Whether something other than the local disk is asked for what lies there."""
    return url is not None and "://" in url and url.partition("://")[0] not in ("file", "local")


def local_root(root: Path, url: str | None) -> Path:
    """The folder that a URL which is not remote means; `root` where there is none."""
    if url is None:
        return root
    _, separator, path = url.partition("://")
    return Path(path) if separator else Path(url).expanduser()
