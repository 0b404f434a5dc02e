"""Settings of `glm53 serve`: what the supervisor itself needs. Everything else goes on to the services in their environment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from services.common.ops_http import split_address
from services.common.settings import ServiceSettings


class ServeSettings(ServiceSettings):
    """Settings of the supervisor."""

    service: ClassVar[str] = "serve"

    host: str = Field("127.0.0.1", validation_alias="HOST", description="Address the HTTP API listens on.")
    port: int = Field(30000, validation_alias="PORT", ge=1, le=65535, description="Port of the HTTP API.")
    instance: str = Field(
        "",
        validation_alias="GLM53_INSTANCE",
        pattern=r"^([a-z0-9][a-z0-9-]{0,31})?$",
        description="Names this deployment's shared memory; empty: from the port, so that two servers on two ports do not meet.",
    )
    state_dir: str = Field(
        "",
        validation_alias="GLM53_STATE_DIR",
        description="Lock and socket of this instance; empty: /tmp/glm53-<user id>/<instance>.",
    )
    worker_address: str = Field(
        "",
        validation_alias="GLM53_WORKER_ADDRESS",
        description="Where `glm53 serve` lets its worker listen: host:port or unix:/path; empty: a socket in the state folder.",
    )
    root: str = Field(
        "",
        validation_alias="GLM53_ROOT",
        description="Folder of this installation: relative paths, the shipped model's too, begin there; empty: the current one.",
    )
    boot_timeout_s: float = Field(
        600.0,
        validation_alias="GLM53_BOOT_TIMEOUT_S",
        gt=0,
        description="Seconds without any progress until services that are not ready count as failed.",
    )
    drain_timeout_s: float = Field(
        30.0,
        validation_alias="GLM53_DRAIN_TIMEOUT_S",
        ge=0,
        description="Seconds that running requests get to finish on SIGTERM.",
    )
    liveness_checks: int = Field(
        6,
        validation_alias="GLM53_LIVENESS_CHECKS",
        ge=0,
        le=1000,
        description="A gateway or worker that served and then left so many questions in a row unanswered is restarted; 0: never.",
    )
    liveness_period_s: float = Field(
        5.0,
        validation_alias="GLM53_LIVENESS_PERIOD_S",
        ge=0.1,
        le=600,
        description="Seconds between two of these questions, and the longest wait for an answer.",
    )
    mode: Literal["auto", "fast", "exact", "nvme", "nvme-exact"] = Field(
        "auto",
        validation_alias="GLM53_MODE",
        description="Expert placement; auto takes the fastest that fits and says why.",
    )

    @field_validator("worker_address")
    @classmethod
    def _one_worker(cls, address: str) -> str:
        if not address or (address.startswith("unix:/") and "," not in address):
            return address
        try:
            if "," not in address and "//" not in address and split_address(address)[1]:
                return address
        except ValueError:
            pass
        raise ValueError(
            f"`glm53 serve` runs one worker of its own, which cannot listen on {address!r}: use host:port or unix:/path, or unset it. A"
            " gateway for workers that run elsewhere is started by `python -m services.gateway`"
        )

    def for_services(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of the services: what we were given, with what they must agree on filled in."""
        return {
            **env,
            "HOST": self.host,
            "PORT": str(self.port),
            "GLM53_INSTANCE": self.instance_name,
            "GLM53_WORKER_ADDRESS": self.worker_listens_on,
        }

    @property
    def instance_name(self) -> str:
        """The instance's name with the default filled in."""
        return self.instance or f"p{self.port}"

    @property
    def state_path(self) -> Path:
        """The state folder with the default filled in."""
        return Path(self.state_dir or Path(tempfile.gettempdir()) / f"glm53-{os.getuid()}" / self.instance_name)

    @property
    def worker_listens_on(self) -> str:
        """gRPC address of the worker; by default a Unix socket that only this user can open."""
        return self.worker_address or f"unix:{self.state_path / 'worker.sock'}"
