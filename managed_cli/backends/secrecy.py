"""What keeps an API key, or a password in an address, out of everything that is shown or recorded."""

from __future__ import annotations

import base64
import functools
import html
import re
import unicodedata
import urllib.parse

from managed_cli.errors import ConfigError

BLOT = b"[the API key]"
"""What a message has in the place of the key."""

WHERE_KEYS_COME_FROM = "give the key with --api-key-env VAR or --api-key-file FILE"


def checked_key(key: str, source: str) -> str:
    """`key` without white space around it.

    Raises:
        ConfigError: it is empty, or cannot be part of an HTTP header; the message has `source`, and nothing of the key.
    """
    stripped = key.strip()
    if not stripped:
        raise ConfigError(f"{source}: expected an API key, there is none")
    if "\n" in stripped or "\r" in stripped:
        raise ConfigError(f"{source}: expected an API key alone, there are several lines")
    if not (stripped.isascii() and stripped.isprintable()):
        raise ConfigError(
            f"{source}: the API key has a character that no HTTP header can carry",
            hint="only printable ASCII can be sent; was it copied with something around it?",
        )
    return stripped


def refuse_credentials(base_url: str) -> None:
    """Raise ConfigError for an address with a user name, a password or a query; it shows none of them.

    A password may hold any character, so that an `@` anywhere counts, however it is written.
    """
    if "@" in unicodedata.normalize("NFKC", urllib.parse.unquote(base_url)):
        raise ConfigError(
            "a --base-url holds an `@`: a user name or a password has no place in it, since addresses are recorded",
            hint=WHERE_KEYS_COME_FROM,
        )
    address, *more = re.split(r"[?#]", base_url, maxsplit=1)
    if more:
        raise ConfigError(
            f"--base-url {address!r} goes on with a query or a fragment: an address ends before that",
            hint=f"if it was a key: {WHERE_KEYS_COME_FROM}",
        )


def without_key(body: bytes, key: str | None) -> bytes:
    """`body` with the key blotted out, however it is escaped: some servers quote the key that they refuse."""
    return _forms(key).sub(BLOT, body) if key else body


@functools.lru_cache(maxsize=16)
def _forms(key: str) -> re.Pattern[bytes]:
    """Matches the key as it is, in JSON, Python, URLs and HTML, and in base64."""
    spelled = "".join(_spellings(character) for character in key)
    whole = [text.encode() for text in (key, f"Bearer {key}", f":{key}")]
    encoded = {form(text).rstrip(b"=").decode() for text in whole for form in (_plain64, base64.urlsafe_b64encode)}
    alternatives = [spelled, *map(re.escape, sorted(encoded, key=len, reverse=True))]
    return re.compile("|".join(alternatives).encode())


def _plain64(text: bytes) -> bytes:
    return base64.b64encode(text)


def _spellings(character: str) -> str:
    code = ord(character)
    named = re.escape(html.escape(character))
    hexadecimal = f"(?i:{code:02x})"
    return (
        rf"(?:\\*{re.escape(character)}|%{hexadecimal}|\\+u00{hexadecimal}|\\+x{hexadecimal}"
        rf"|&\#0*{code};|&\#(?i:x)0*{hexadecimal};|{named})"
    )
