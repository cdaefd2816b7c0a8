"""A disk of a megabyte, and others that fail: real ones where this process may mount, else what comes nearest."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

DISK_BYTES = 1024 * 1024


@contextlib.contextmanager
def mounted(directory: Path) -> Iterator[Path]:
    """`directory`, made and mounted as a disk of a megabyte; the test is skipped where this is not allowed."""
    directory.mkdir()
    size = f"size={DISK_BYTES}"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip(f"NO DISK CAN BE MOUNTED HERE, SO A FULL ONE IS NOT TESTED: {done.stderr if done else 'not root'}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def free_bytes(disk: Path) -> int:
    facts = os.statvfs(disk)
    return facts.f_bavail * facts.f_frsize


def fill_up(disk: Path, *, leaving: int = 0) -> Path:
    """A file that takes all room on `disk` but so many bytes."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(free_bytes(disk) - leaving))
    return ballast


def remount(disk: Path, *, read_only: bool) -> None:
    subprocess.run(["mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(disk)], check=True)
