"""Names in the folder of a file storage: one folder per writer, one file per batch, sorted by age.

``w-<writer id>/<incarnation>-<random>-<sequence>-<groups>.arrow``. Writer ids are host names as often as not, so any
text makes a safe folder name, and two of them never the same, also where capitals count as small letters.
"""

import hashlib
import re
from typing import NamedTuple

SUFFIX = ".arrow"
FOLDER_PATTERN = "w-*"
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_.")
_LONGEST = 150
"""Bytes of an encoded id; file systems allow 255 for a name."""
_FILE = re.compile(r"(\d{20})-([0-9a-f]{12})-(\d{12})-(\d{6,})\.arrow")


def writer_folder(writer_id: str) -> str:
    """The folder of a writer: its id, percent-encoded; a very long one is cut and told apart by a hash."""
    raw = writer_id.encode("utf-8", "surrogatepass")
    encoded = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)
    if len(encoded) > _LONGEST:
        encoded = f"{encoded[:80]}~{hashlib.sha256(raw).hexdigest()}"
    return f"w-{encoded}"


class BatchName(NamedTuple):
    """The name of one batch's file; sorts as its writer wrote.

    Attributes:
        incarnation: Nanoseconds since 1970 at which the writer began, or one more than the newest it found.
        unique: Random, so that two processes under one id cannot overwrite each other's files.
        sequence: Counts from 0.
        groups: In the batch: what waits can be counted without opening a file.
    """

    incarnation: int
    unique: str
    sequence: int
    groups: int

    @property
    def life(self) -> tuple[int, str]:
        """Whose sequence it is."""
        return self.incarnation, self.unique

    @property
    def file_name(self) -> str:
        """As it stands in the folder."""
        return f"{self.incarnation:020d}-{self.unique}-{self.sequence:012d}-{self.groups:06d}{SUFFIX}"

    @classmethod
    def parse(cls, file_name: str) -> "BatchName | None":
        """None for whatever else lies in a folder: unfinished files, a file system's own."""
        match = _FILE.fullmatch(file_name)
        if match is None:
            return None
        incarnation, unique, sequence, groups = match.groups()
        return cls(int(incarnation), unique, int(sequence), int(groups))
