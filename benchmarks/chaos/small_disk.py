"""A disk that can be full: a small tmpfs of its own for the run directory, where one may be mounted."""

import os
import subprocess
from pathlib import Path
from types import TracebackType

MIB = 1024 * 1024
BALLAST = "ballast"


class SmallDisk:
    """A folder on a file system of limited size; unmounted at the end. A context manager.

    Where nothing may be mounted, the folder lies on the ordinary disk and `can_be_full` is false.

    Args:
        folder: Made where it is missing.
        size_mib: Of the file system.
    """

    def __init__(self, folder: Path, size_mib: int) -> None:
        self.folder = folder
        self.can_be_full = False
        self.reason = ""
        self._size_mib = size_mib

    def __enter__(self) -> "SmallDisk":
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._size_mib}m,mode=700", "tmpfs", str(self.folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except FileNotFoundError:
            self.reason = "there is no mount command"
            return self
        self.can_be_full, self.reason = done.returncode == 0, done.stderr.strip()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.can_be_full:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True, timeout=30)

    def in_words(self) -> str:
        """For the output."""
        if self.can_be_full:
            return f"the run directory is on a tmpfs of {self._size_mib} MiB, which is filled to the last byte"
        return (
            f"no tmpfs may be mounted here ({self.reason}): the kinds «full disk» and «full checkpoints» are left out"
        )

    def fill(self, left_bytes: int = 0) -> int:
        """Takes all space but so much, again where some came free; returns how many bytes it holds."""
        path = self.folder / BALLAST
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            block = bytes(MIB)
            while len(block) >= 1:
                try:
                    os.write(descriptor, block)
                except OSError:
                    block = block[: len(block) // 2]
            if left_bytes:
                os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - left_bytes))
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Gives it back."""
        (self.folder / BALLAST).unlink(missing_ok=True)
