"""The tokenizer's files as the gateway gets them, and the sampling defaults of generation_config.json."""

from __future__ import annotations

import hashlib
import json
import pathlib
from dataclasses import dataclass
from typing import Any, Self

from services.common.errors import CheckpointError


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a checkpoint's tokenizer files."""

    tokenizer_json: bytes
    tokenizer_config_json: str
    chat_template: str
    generation_config_json: str
    default_temperature: float
    default_top_p: float
    default_top_k: int

    @classmethod
    def from_directory(cls, model_dir: pathlib.Path) -> Self:
        """Reads them.

        Raises:
            CheckpointError: tokenizer.json or the chat template is missing, or a file is not valid JSON.
        """
        config_text = _read(model_dir / "tokenizer_config.json")
        generation_text = _read(model_dir / "generation_config.json", optional=True) or "{}"
        config, generation = (
            _parse(config_text, model_dir / "tokenizer_config.json"),
            _parse(generation_text, model_dir / "generation_config.json"),
        )
        template = _read(model_dir / "chat_template.jinja", optional=True) or config.get("chat_template")
        if not isinstance(template, str):
            raise CheckpointError(f"{model_dir} has no chat template: need chat_template.jinja")
        greedy = generation.get("do_sample") is False
        return cls(
            _read(model_dir / "tokenizer.json").encode(),
            config_text,
            template,
            generation_text,
            default_temperature=0.0 if greedy else float(generation.get("temperature", 1.0)),
            default_top_p=float(generation.get("top_p", 1.0)),
            default_top_k=int(generation.get("top_k", 0)),
        )

    @property
    def sha256(self) -> str:
        """Hex SHA-256 over all files: a gateway asks for them again only when it changes."""
        digest = hashlib.sha256()
        for part in (
            self.tokenizer_json,
            self.tokenizer_config_json.encode(),
            self.chat_template.encode(),
            self.generation_config_json.encode(),
        ):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def _read(path: pathlib.Path, *, optional: bool = False) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if optional:
            return ""
        raise CheckpointError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None


def _parse(text: str, path: pathlib.Path) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return document
