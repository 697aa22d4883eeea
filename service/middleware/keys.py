"""API keys: authenticate a request and limit its scopes.  The settings hold only SHA-256 hashes, so
they reveal no key.

A key is 256 random bits, so a fast hash is enough: nobody can guess the key from it.  Slow hashes
protect passwords, which people choose.  ``gpumemnet keys new --name ci --scopes predict+observe``
makes a key.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from gpumemnet.errors import InvalidRequestError

SCOPES: Final = ("predict", "observe", "admin")
"""The scopes of a key: request predictions, report the observed memory of jobs, and administrate
the models."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_RULE: Final = (
    "must be name:scopes:hash, with scopes of "
    f"{', '.join(SCOPES)} joined by '+', and the key's SHA-256 in 64 hexadecimal digits (not the key itself)"
)
_MAX_KEY_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key, without the key itself.

    Attributes:
        name: for the log and the rate limit.
        scopes: some of :data:`SCOPES`.
        digest: SHA-256 of the key.
    """

    name: str
    scopes: frozenset[str]
    digest: bytes


class KeyRing:
    """All configured API keys."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, other: KeyRing) -> None:
        """Hold the keys of ``other`` from now on."""
        self._keys = other._keys

    def find(self, presented: bytes) -> ApiKey | None:
        """The key that was presented, or ``None``; its run time reveals nothing about the keys."""
        if len(presented) > _MAX_KEY_BYTES:
            return None
        digest = sha256(presented).digest()
        found = None
        for key in self._keys:
            if compare_digest(digest, key.digest):
                found = key
        return found


def parse_key(text: str) -> ApiKey:
    """The key in one entry of the settings.

    Raises:
        ValueError: describes the expected entry; never repeats the entry, because it may hold a
            key.
    """
    parts = text.strip().split(":")
    if len(parts) != 3:
        raise ValueError(_RULE)
    name, scopes, digest = parts
    names = scopes.split("+")
    if not (_NAME.fullmatch(name) and set(names) <= set(SCOPES) and _SHA256.fullmatch(digest)):
        raise ValueError(_RULE)
    return ApiKey(name, frozenset(names), bytes.fromhex(digest))


def parse_keys(text: str) -> KeyRing:
    """The keys of a setting or a file: entries separated by commas or lines; ``#`` begins a
    comment.

    Raises:
        ValueError: names the invalid entry and its fault.
    """
    entries = [
        entry
        for line in text.splitlines()
        for entry in line.partition("#")[0].split(",")
        if entry.strip()
    ]
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries, start=1):
        try:
            key = parse_key(entry)
        except ValueError as error:
            raise ValueError(f"has an entry that cannot be used: number {number} {error}") from None
        if key.name in {other.name for other in keys}:
            raise ValueError(
                f"has two keys of the name {key.name!r}: the log could not tell them apart"
            )
        twin = next((other.name for other in keys if other.digest == key.digest), None)
        if twin is not None:
            raise ValueError(
                f"has one key under two names, {twin!r} and {key.name!r}: give it one name with all its scopes"
            )
        keys.append(key)
    return KeyRing(keys)


def new_key(name: str, scopes: str) -> tuple[str, str]:
    """A new key, and its entry for the settings.

    Args:
        name: the key's owner.
        scopes: some of :data:`SCOPES`, joined by ``+``.

    Raises:
        InvalidRequestError: for an invalid name or an unknown scope.
    """
    key = secrets.token_urlsafe(32)
    entry = f"{name}:{scopes}:{sha256(key.encode()).hexdigest()}"
    try:
        parse_key(entry)
    except ValueError:
        reason = f"--name must match {_NAME.pattern} and --scopes be some of {', '.join(SCOPES)}"
        raise InvalidRequestError(reason) from None
    return key, entry
