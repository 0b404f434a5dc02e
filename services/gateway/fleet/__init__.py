"""One worker or several: what the rest of the gateway sees of them is one `WorkerClient`."""

from __future__ import annotations

from services.gateway.fleet.client import FleetClient
from services.gateway.fleet.members import DNS, Members, addresses_of
from services.gateway.settings import GatewaySettings
from services.gateway.worker_client import GrpcWorkerClient, WorkerClient


def worker_for(settings: GatewaySettings) -> WorkerClient:
    """The client for GLM53_WORKER_ADDRESS.

    Raises:
        ConfigError: the setting is no address.
    """
    addresses = addresses_of(settings.worker_address)
    if len(addresses) == 1 and not addresses[0].startswith(DNS):
        return GrpcWorkerClient(addresses[0], settings.connect_timeout_s)
    return FleetClient(Members(addresses, lambda address: GrpcWorkerClient(address, settings.connect_timeout_s)))
