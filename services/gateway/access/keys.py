"""API keys: who may ask, and how much. The file holds hashes only; a key itself is shown once, when it is made.

    {"keys": [{"id": "team-a", "sha256": "<64 hex digits>", "requests_per_minute": 60}]}

README.md of this folder has every field. Keys are random and long, so one round of SHA-256 is enough: there is nothing to guess.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from services.common.command import COMMAND
from services.common.errors import ConfigError
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb

KEY_PREFIX = "sk-glm53-"
_KEY_BYTES = 32
# Longer than any key of ours; what is longer is not hashed.
MAX_KEY_CHARS = 512
# A shorter key could be guessed, and its hash reversed.
MIN_KEY_CHARS = 24
_MAX_FILE_BYTES = 16 * 1024 * 1024

PRIORITIES = {"high": pb.PRIORITY_HIGH, "normal": pb.PRIORITY_NORMAL, "batch": pb.PRIORITY_BATCH}


class ApiKey(BaseModel):
    """One entry of the key file. A limit that is absent does not exist.

    Attributes:
        id: names the key in logs, counters and the worker's queue; never the key itself.
        sha256: hash of the key, 64 hex digits.
        admin: may read /stats and cancel anybody's requests.
        priority: the best band of the queue that its requests may ask for, and the one they get without asking.
        models: names of the models it may use; None for all.
        requests_per_minute, tokens_per_minute, tokens_per_day: limits over sliding windows; tokens of prompt and answer.
        concurrency: requests at the same time.
        expires: not valid from then on.
        fail_closed: refuse rather than count locally while Redis is away.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    admin: bool = False
    priority: Literal["high", "normal", "batch"] = "normal"
    models: tuple[str, ...] | None = Field(default=None, strict=False)
    requests_per_minute: int | None = Field(default=None, ge=1, le=10**9)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)
    tokens_per_day: int | None = Field(default=None, ge=1, le=10**12)
    concurrency: int | None = Field(default=None, ge=1, le=100_000)
    expires: AwareDatetime | None = Field(default=None, strict=False)
    fail_closed: bool = False

    @property
    def is_expired(self) -> bool:
        """True from its expiry on."""
        return self.expires is not None and datetime.datetime.now(datetime.UTC) >= self.expires

    def may_use(self, model: str) -> bool:
        """True when the key may use the model."""
        return self.models is None or model in self.models

    def priority_of(self, asked: int) -> int:
        """The band that a request gets: what it asks for, but no better than the key's own."""
        own = PRIORITIES[self.priority]
        return own if asked == pb.PRIORITY_UNSPECIFIED else max(own, asked)


# Who asks where no keys are configured: everybody, without limits, as on one's own machine.
ANYONE = ApiKey(id="anonymous", sha256="0" * 64, admin=True, priority="high")


class KeyTable:
    """Keys by hash.

    Args:
        keys: their hashes differ.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.keys = tuple(keys)
        self._buckets: dict[bytes, list[tuple[bytes, ApiKey]]] = {}
        for key in self.keys:
            digest = bytes.fromhex(key.sha256)
            self._buckets.setdefault(digest[:2], []).append((digest, key))

    def find(self, digest: bytes) -> ApiKey | None:
        """The key with this SHA-256. Only two bytes of the hash, which nobody can choose, decide how long it takes."""
        found = None
        for candidate, key in self._buckets.get(digest[:2], ()):
            if hmac.compare_digest(candidate, digest):
                found = key
        return found


def new_key() -> str:
    """A fresh key with 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> bytes:
    """What the file and the table know of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_keys(text: str, source: str) -> KeyTable:
    """Reads the content of a key file.

    Args:
        text: JSON.
        source: the file, for messages.

    Raises:
        ConfigError: names the entry and the field at fault.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}", param="GLM53_API_KEYS_FILE") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f'{source} must be {{"keys": [...]}}; `{COMMAND} keys create` writes it', param="GLM53_API_KEYS_FILE")
    keys: list[ApiKey] = []
    for index, entry in enumerate(entries):
        try:
            keys.append(ApiKey.model_validate(entry))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "entry"
            raise ConfigError(f"{source}: keys[{index}].{field}: {first['msg']}", param="GLM53_API_KEYS_FILE") from None
    for name, values in (("id", [key.id for key in keys]), ("sha256", [key.sha256 for key in keys])):
        seen: set[str] = set()
        for index, value in enumerate(values):
            if value in seen:
                raise ConfigError(f"{source}: keys[{index}].{name} is there twice", param="GLM53_API_KEYS_FILE")
            seen.add(value)
    return KeyTable(keys)


def read_keys(path: Path) -> KeyTable:
    """Reads a key file.

    Raises:
        ConfigError: it cannot be read, or what `parse_keys` says.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES} bytes", param="GLM53_API_KEYS_FILE")
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the key file {path}: {error}", param="GLM53_API_KEYS_FILE") from None
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}{_remedy(error, path)}", param="GLM53_API_KEYS_FILE") from None
    return parse_keys(text, str(path))


def _remedy(error: OSError, path: Path) -> str:
    if isinstance(error, FileNotFoundError):
        return f". `{COMMAND} keys create --file {path} --id NAME` makes it"
    if isinstance(error, PermissionError):
        return f". Let user {os.getuid()} read it"
    return ""
