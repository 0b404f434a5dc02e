"""The objects that requests share; made once per app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.access.admission import AccessPolicy
from services.gateway.access.cancels import Canceller
from services.gateway.access.keyring import KeyRing
from services.gateway.access.ledger import UsageLedger
from services.gateway.answers import Answer
from services.gateway.drain import Traffic
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings
from services.gateway.shared.bus import Bus
from services.gateway.shared.key_share import KeyShare
from services.gateway.shared.link import RedisLink
from services.gateway.worker_client import WorkerClient
from services.gateway.worker_watch import WorkerWatch


@dataclass(frozen=True)
class Services:
    """What a route needs besides its request.

    Attributes:
        keys: None where no keys are asked for.
        link, bus, key_share: what gateways share through Redis, None where each is for itself.
        canceller: ends requests by their ids.
        ledger: where usage is written to, None where it is not.
    """

    settings: GatewaySettings
    client: WorkerClient
    watch: WorkerWatch
    traffic: Traffic
    metrics: GatewayMetrics
    access: AccessPolicy
    keys: KeyRing | None
    link: RedisLink | None
    bus: Bus | None
    key_share: KeyShare | None
    canceller: Canceller
    ledger: UsageLedger | None


@dataclass(frozen=True)
class Scoring:
    """A prompt to be scored without an answer.

    Attributes:
        request: what the worker gets.
        first: the prompt's first token, which follows nothing and has no log-probability.
    """

    request: pb.ScoreRequest
    first: pb.Token


@dataclass(frozen=True)
class Job:
    """A request that is ready to run.

    Attributes:
        requests: what the worker gets, one for each generation.
        answer: what its tokens become.
        params: the worker's names of fields → the client's, for errors.
    """

    requests: Sequence[pb.GenerateRequest | Scoring]
    answer: Answer
    params: Mapping[str, str] = field(default_factory=dict)
