"""The tokenizer's files as the gateway gets them, and the sampling defaults of generation_config.json."""

from __future__ import annotations

import hashlib
import json
import pathlib
from dataclasses import dataclass
from typing import Any, Self

import jinja2
import jinja2.ext

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
        _check_template(template, model_dir / "chat_template.jinja")
        greedy = generation.get("do_sample") is False
        return cls(
            _read(model_dir / "tokenizer.json").encode(),
            config_text,
            template,
            generation_text,
            default_temperature=0.0 if greedy else _number(generation, "temperature", 1.0, 0, 100, model_dir),
            default_top_p=_number(generation, "top_p", 1.0, 1e-6, 1, model_dir),
            default_top_k=int(_number(generation, "top_k", 0, -1, 2**31 - 1, model_dir)),
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


def _check_template(text: str, path: pathlib.Path) -> None:
    """Compiles the template, which gateways do too: a checkpoint that no gateway can use is refused at start, not at the first request."""
    try:
        jinja2.Environment(autoescape=False, extensions=[jinja2.ext.loopcontrols]).from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{path} line {error.lineno}: {error.message}") from None


def _number(document: dict[str, Any], name: str, default: float, low: float, high: float, model_dir: pathlib.Path) -> float:
    value = document.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(
            f"{model_dir / 'generation_config.json'}: {name} is {str(value)[:60]!r}, need a number from {low:g} to {high:g}"
        )
    return value


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
