"""One number for many contents, in whatever order they come."""

from __future__ import annotations

import hashlib

import numpy as np

DIGEST_BYTES = 32
DIGESTS_AT_ONCE = 4096
"""How many SHA-256 are added up together: one by one, the numbers take longer than the hashing."""


class DigestSum:
    """The sum of SHA-256 digests modulo 2^256: one number for contents in any order."""

    def __init__(self) -> None:
        self._sum = 0
        self._waiting = bytearray()

    def add(self, content: bytes) -> None:
        self._waiting += hashlib.sha256(content).digest()
        if len(self._waiting) >= DIGESTS_AT_ONCE * DIGEST_BYTES:
            self._add_waiting()

    def _add_waiting(self) -> None:
        # Columns of 32 bits: in 64 there is room for the sum of four thousand millions of them.
        words = np.frombuffer(bytes(self._waiting), dtype=">u4").reshape(-1, DIGEST_BYTES // 4)
        columns = words.sum(axis=0, dtype=np.uint64).tolist()
        self._sum += sum(column << 32 * place for place, column in enumerate(reversed(columns)))
        self._waiting.clear()

    def hex(self) -> str:
        """64 hex digits."""
        self._add_waiting()
        return f"{self._sum % 2 ** (8 * DIGEST_BYTES):064x}"
