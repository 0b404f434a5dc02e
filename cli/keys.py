"""`glm53 keys`: makes, lists and withdraws API keys. The file holds hashes; a key is shown once, when it is made."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.command import COMMAND
from services.common.errors import ConfigError
from services.common.lifecycle import ExitCode
from services.common.settings import enter_root, environ
from services.gateway.access.keys import MIN_KEY_CHARS, PRIORITIES, digest_of, new_key, parse_keys, read_keys

# Field of the entry, and option → what it bounds.
_NUMBERS = {
    "requests_per_minute": "requests in any minute",
    "tokens_per_minute": "tokens of prompts and answers in any minute",
    "tokens_per_day": "the same in any 24 hours",
    "concurrency": "requests that run at a time",
}


def add_parser(commands: Any) -> None:
    """Adds `keys` and its actions to the command line."""
    keys = commands.add_parser("keys", help="make, list and withdraw the API keys of GLM53_API_KEYS_FILE")
    actions = keys.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", help="add a key to the file and print it, once")
    _add_file(create, "the key file; made when it does not exist")
    create.add_argument("--id", required=True, help="names the key in logs and limits")
    for name, what in _NUMBERS.items():
        create.add_argument(f"--{name.replace('_', '-')}", type=int, default=None, metavar="N", help=f"{what} (default: no limit)")
    create.add_argument(
        "--priority",
        choices=sorted(PRIORITIES),
        default=None,
        help="best band of the queue for its requests, and the usual one (default: normal)",
    )
    create.add_argument("--model", action="append", dest="models", help="a model that the key may use; may be repeated (default: all)")
    create.add_argument("--expires", default=None, help="when it ends, such as 2027-01-31T00:00:00Z")
    create.add_argument("--admin", action="store_true", help="may read /stats and cancel anybody's requests")
    create.add_argument("--fail-closed", action="store_true", help="refuse rather than count locally while Redis is away")
    revoke = actions.add_parser("revoke", help="take a key out of the file")
    _add_file(revoke, "the key file")
    revoke.add_argument("--id", required=True, help="as it was created")
    listed = actions.add_parser("list", help="show the keys of the file, without their hashes")
    _add_file(listed, "the key file")
    actions.add_parser("hash", help="read a key from standard input and print the hash for the file")


def _add_file(action: argparse.ArgumentParser, what: str) -> None:
    action.add_argument("--file", type=Path, default=None, help=f"{what} (default: GLM53_API_KEYS_FILE)")


def run(args: argparse.Namespace) -> int:
    """Runs one action.

    Raises:
        ConfigError: the file or an option cannot be used.
    """
    if args.action != "hash" and args.file is None:
        args.file = _file_of_the_server(environ())
    actions = {"create": _create, "revoke": _revoke, "list": _list, "hash": _hash}
    actions[args.action](args)
    return ExitCode.OK


def _file_of_the_server(env: Mapping[str, str]) -> Path:
    """The key file that a server with these settings reads."""
    if not (name := env.get("GLM53_API_KEYS_FILE", "")):
        raise ConfigError("which key file? Give --file, or set GLM53_API_KEYS_FILE as the server has it")
    enter_root(env.get("GLM53_ROOT", ""))
    return Path(name)


def _create(args: argparse.Namespace) -> None:
    entries = _entries(args.file) if args.file.exists() else []
    if any(entry["id"] == args.id for entry in entries):
        raise ConfigError(f"{args.file} has a key {args.id!r} already: take another --id, or withdraw it with `{COMMAND} keys revoke`")
    key = new_key()
    entry: dict[str, Any] = {"id": args.id, "sha256": digest_of(key).hex()}
    entry |= {name: value for name in (*_NUMBERS, "priority", "models", "expires") if (value := getattr(args, name)) is not None}
    entry |= {name: True for name in ("admin", "fail_closed") if getattr(args, name)}
    _write(args.file, [*entries, entry])
    print(key)
    print(f"added {args.id!r} to {args.file}; the key is not stored anywhere: keep it now", file=sys.stderr)


def _revoke(args: argparse.Namespace) -> None:
    entries = _entries(args.file)
    left = [entry for entry in entries if entry["id"] != args.id]
    if len(left) == len(entries):
        raise ConfigError(f"{args.file} has no key {args.id!r}")
    _write(args.file, left)
    print(f"{args.id} is withdrawn; running gateways notice within a second", file=sys.stderr)


def _list(args: argparse.Namespace) -> None:
    for key in read_keys(args.file).keys:
        shown = key.model_dump(mode="json", exclude={"sha256"}, exclude_defaults=True)
        print(json.dumps(shown | ({"expired": True} if key.is_expired else {})))


def _hash(_args: argparse.Namespace) -> None:
    key = sys.stdin.readline().strip()
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"a key needs at least {MIN_KEY_CHARS} characters; `{COMMAND} keys create` makes a good one")
    print(digest_of(key).hex())


def _entries(path: Path) -> list[dict[str, Any]]:
    read_keys(path)
    return list(json.loads(path.read_text("utf-8"))["keys"])


def _write(path: Path, entries: list[dict[str, Any]]) -> None:
    """Replaces the file in one step, readable for its owner only: a gateway never sees half of it. A link stays one."""
    path = Path(os.path.realpath(path))
    text = json.dumps({"keys": entries}, indent=2) + "\n"
    parse_keys(text, str(path))
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            if path.exists():
                os.chmod(file.name, path.stat().st_mode & 0o777)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)  # it has hashes of keys
            raise
