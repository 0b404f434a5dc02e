"""The `glm53` command."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from cli import keys, stream_rate
from cli.doctor import command as doctor
from cli.serve import Supervisor, print_settings
from cli.settings import ServeSettings
from services.common.command import COMMAND
from services.common.errors import Glm53Error
from services.common.lifecycle import ExitCode
from services.common.logs import configure_logging
from services.common.settings import ServiceSettings, enter_root, environ
from services.common.version import VERSION
from services.cpu_expert.settings import CpuExpertSettings
from services.gateway.settings import GatewaySettings
from services.gpu_worker.settings import GpuWorkerSettings

log = logging.getLogger("glm53")

SERVICES: tuple[type[ServiceSettings], ...] = (GatewaySettings, GpuWorkerSettings, CpuExpertSettings)

# `glm53 serve` flag → environment name. The single-dash names are those that users of the model's first servers know; of a flag given
# twice the last value wins, and a flag beats the environment.
SERVE_FLAGS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("--host",), "HOST", "address the HTTP API listens on (default 127.0.0.1)"),
    (("--port", "-p"), "PORT", "port of the HTTP API (default 30000)"),
    (("--mode",), "GLM53_MODE", "auto, fast or exact"),
    (("--model-dir", "-m"), "GLM53_MODEL_DIR", "checkpoint folder (default: the small one that ships with the code)"),
    (("--device",), "GLM53_DEVICE", "auto, cpu or cuda"),
    (("--served-name",), "SERVED_NAME", "model name that clients ask for"),
    (("--instance",), "GLM53_INSTANCE", "names the shared memory (default: from the port)"),
    (("--slots",), "GLM53_EC_MAX_SLOTS", "most expert cache slots"),
    (("--context",), "GLM53_CONTEXT_TOKENS", "context length in tokens"),
    (("-cs",), "GLM53_CACHE_TOKENS", "tokens of the GPU's key-value cache, over all streams"),
    (("--max-batch-size",), "GLM53_MAX_STREAMS", "most streams that decode at a time"),
    (("--max-rq-tokens",), "GLM53_MAX_RQ_TOKENS", "tokens of an answer that a GPU's cache pages are reserved for at admission"),
    (("-ambs",), "GLM53_STEP_STREAMS", "most streams in one pass of a GPU's decode step"),
    (("-chunk_size",), "GLM53_CHUNK_SIZE", "prefill chunk in tokens"),
    (("-rcs",), "GLM53_PREFIX_CACHE_MB", "host memory for states of earlier prompts, in GB here"),
    (("--log-level",), "GLM53_LOG_LEVEL", "debug, info, warning or error"),
    (("--log-format",), "GLM53_LOG_FORMAT", "console or json"),
)


def _gigabytes(text: str) -> str:
    """MiB of so many GB."""
    try:
        return str(round(float(text) * 1024))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of gigabytes") from None


# Flags whose unit is not the setting's.
CONVERTED: dict[str, Callable[[str], str]] = {"-rcs": _gigabytes}


def build_parser() -> argparse.ArgumentParser:
    """The command line of `glm53`."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Serve GLM-5.3-Flash from one GPU plus host RAM.")
    parser.add_argument("--version", action="version", version=f"glm53-offload {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run gateway, gpu_worker and cpu_expert on this machine")
    for flags, name, text in SERVE_FLAGS:
        serve.add_argument(*flags, dest=name, default=None, type=CONVERTED.get(flags[0], str), help=f"{text} [{name}]")
    keys.add_parser(commands)
    stream_rate.add_parser(commands)
    doctor.add_parser(commands)
    return parser


def serve(args: argparse.Namespace) -> int:
    """Runs `glm53 serve`."""
    given = {name: str(value) for _, name, _ in SERVE_FLAGS if (value := getattr(args, name)) is not None}
    env = {**environ(), **given}
    own = {field: given[str(info.validation_alias)] for field, info in ServeSettings.model_fields.items() if info.validation_alias in given}
    settings = ServeSettings.load(env, **own)
    configure_logging("serve", level=settings.log_level, json_lines=settings.log_format == "json")
    for service in SERVICES:
        service.load(settings.for_services(env))  # a setting that one of them would refuse is refused before anything starts
    print_settings(settings)
    enter_root(settings.root)
    return Supervisor(settings, env).run()


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "serve": serve,
    "keys": keys.run,
    "stream-rate": stream_rate.run,
    "doctor": doctor.run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = build_parser().parse_args(argv)
    configure_logging("glm53")
    try:
        return COMMANDS[args.command](args)
    except Glm53Error as error:
        log.error("%s", error.message)
        return ExitCode.CONFIG


if __name__ == "__main__":
    sys.exit(main())
