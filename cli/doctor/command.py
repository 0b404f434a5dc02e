"""The command: arguments, report, exit code."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from cli.doctor import hardware, store
from cli.doctor.findings import Finding, Level, fail, ok
from cli.doctor.machine import Machine
from cli.settings import ServeSettings
from services.common.errors import ConfigError
from services.common.lifecycle import ExitCode, hold_stop_signals
from services.common.settings import enter_root, environ
from services.common.shm_room import size_in_words

SUMMARY = "check this machine and the settings, and say how to fix what would go wrong; changes nothing"
# Service → the module whose `check` looks at it. Imported when asked for: a container has the packages of its own service only.
SERVICES = {"gateway": "cli.doctor.gateway", "gpu-worker": "cli.doctor.worker", "cpu-expert": "cli.doctor.expert"}


def add_parser(commands: Any) -> None:
    """Adds `doctor` to the command line."""
    add_arguments(commands.add_parser("doctor", help=SUMMARY))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    parser.add_argument(
        "--for", dest="service", choices=sorted(SERVICES), help="check what this service needs (default: the machine and all)"
    )
    parser.add_argument("--store", type=pathlib.Path, metavar="FOLDER", help="also check a folder for the expert store of the nvme modes")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("then", nargs="*", metavar="-- COMMAND", help="when nothing fails, run this in place of the doctor")


def run(args: argparse.Namespace, machine: Machine | None = None, env: Mapping[str, str] | None = None) -> int:
    """Prints the findings; 78 when one of them fails, else 0, or what the given command makes of it.

    Args:
        args: parsed options.
        machine: what to look at, this one when None.
        env: the settings, the process's environment when None.
    """
    machine, env = machine or Machine(), environ() if env is None else env
    try:
        enter_root(env.get("GLM53_ROOT", ""))
        found = list(_findings(args, machine, env))
    except ConfigError as error:
        found = [Finding("settings", Level.FAIL, error.message)]
    (_print_json if args.json else _print)(found, brief=bool(args.then))
    if any(finding.level is Level.FAIL for finding in found):
        return ExitCode.CONFIG
    if args.then:
        sys.stdout.flush()
        if any(word.startswith("services.") for word in args.then):
            hold_stop_signals()  # until the service has its handlers
        os.execvp(args.then[0], args.then)
    return ExitCode.OK


def _findings(args: argparse.Namespace, machine: Machine, env: Mapping[str, str]) -> Iterator[Finding]:
    names = [args.service] if args.service else list(SERVICES)
    if not args.service:
        yield from _host(machine)
        # Of the whole machine: what `glm53 serve` would start with these settings.
        try:
            settings = ServeSettings.load(env)
        except ConfigError as error:
            yield fail("settings", error.message)
        else:
            # Late: containers of a single service have no supervisor.
            yield from importlib.import_module("cli.doctor.state").check(settings, env)
            env = settings.for_services(env)
    for name in names:
        yield from importlib.import_module(SERVICES[name]).check(env, machine)
    if args.store is not None:
        yield from store.check(args.store, machine)


def _host(machine: Machine) -> Iterator[Finding]:
    """Facts of the machine that decide what can be served."""
    memory = machine.memory()
    kind = "cgroup limit" if memory.capped else "host"
    yield ok("memory", f"{size_in_words(memory.limit)} ({kind}), {size_in_words(memory.host_available)} available on the host")
    gpus = machine.gpus()
    if not gpus:
        yield ok("GPU", "none visible: the CPU device serves")
    for found in gpus or []:
        yield ok("GPU", f"{found.name}, {size_in_words(found.memory)}, driver {found.driver}")
    yield from hardware.cdi(machine)


def _print(found: list[Finding], *, brief: bool) -> None:
    seen: set[Finding] = set()
    for finding in found:
        if finding in seen or (brief and finding.level is Level.OK):
            continue
        seen.add(finding)
        print(f"{finding.level:4}  {finding.check}: {finding.message}")
        if finding.fix:
            print(f"      fix: {finding.fix}")
    failed = sum(finding.level is Level.FAIL for finding in seen)
    warned = sum(finding.level is Level.WARN for finding in seen)
    print(f"{failed} failed, {warned} warnings")


def _print_json(found: list[Finding], *, brief: bool) -> None:
    del brief
    print(json.dumps([{"check": f.check, "level": f.level.lower(), "message": f.message, "fix": f.fix} for f in found], indent=2))
