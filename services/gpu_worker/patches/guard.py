"""Refuses to patch a package that is not the one the patches were written for.

A version says what a package claims to be; a fingerprint says what it is: the SHA-256 of a function's or class's source text.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.common.errors import ConfigError

FINGERPRINT_CHARS = 16


@dataclass(frozen=True)
class Target:
    """A function or class that a patch relies on.

    Attributes:
        module: dotted name, e.g. ``exllamav3.modules.linear``.
        qualname: name inside the module, e.g. ``Linear.load_exl3``.
        fingerprint: of its source as it was read.
    """

    module: str
    qualname: str
    fingerprint: str


def source_of(source: str, qualname: str) -> str:
    """The text of one function or class, from its first decorator to its last line.

    Raises:
        KeyError: the source has no such name.
    """
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.stmt | None = None
    for name in qualname.split("."):
        node = next((n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and n.name == name), None)
        if node is None:
            raise KeyError(qualname)
        body = node.body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    # Line ends and trailing blanks are no difference: a wheel unpacked elsewhere may have others.
    return "\n".join(line.rstrip() for line in lines)


def fingerprint(source: str, qualname: str) -> str:
    """Hexadecimal fingerprint of one function or class of a module's source text.

    Raises:
        KeyError: the source has no such name.
    """
    return hashlib.sha256(source_of(source, qualname).encode()).hexdigest()[:FINGERPRINT_CHARS]


def check(package: str, found: str, wanted: str, targets: Iterable[Target], read_source: Callable[[str], str], install: str) -> None:
    """Raises unless version and every fingerprint are the known ones.

    Args:
        package: its name, for the message.
        found: the installed version.
        wanted: the version that the patches were written for.
        targets: what they rely on.
        read_source: gives the source text of a module by its dotted name.
        install: the command that brings the wanted version, for the message.

    Raises:
        ConfigError: names the version, or every function that differs, with what to do.
    """
    if found != wanted:
        raise ConfigError(f"{package} {found} is installed, this build needs {wanted}: run {install}", param="GLM53_DEVICE")
    changed = []
    for target in targets:
        try:
            seen = fingerprint(read_source(target.module), target.qualname)
        except KeyError:
            seen = "missing"
        if seen != target.fingerprint:
            changed.append(f"{target.module}.{target.qualname} ({seen}, need {target.fingerprint})")
    if changed:
        raise ConfigError(
            f"{package} {found} is not the published one, so it is not patched: {'; '.join(changed)}."
            # The same version over it would change nothing.
            f" Remove it (`python -m pip uninstall {package}` in this environment), then run {install}",
            param="GLM53_DEVICE",
        )
