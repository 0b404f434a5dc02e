"""Settings of the gpu_worker service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from services.common.ops_http import OptionalAddress
from services.common.otel import OptionalEndpoint
from services.common.settings import ServiceSettings

# Of the tree that this file is in; other installations have no checkpoint in them.
_TREE = Path(__file__).resolve().parents[2]
ELASTIC_GB = 10.0  # GLM53_EC_ELASTIC_GB unless it is set; 0 lends nothing
MOST_HINTS = 8  # records of a layer that a hint brings ahead
LEAST_CONTEXT = 64  # a chat template's own tokens, a short question and one token of answer


class GpuWorkerSettings(ServiceSettings):
    """What the worker reads from its environment."""

    service: ClassVar[str] = "gpu_worker"

    worker_address: str = Field(
        "127.0.0.1:30051",
        validation_alias="GLM53_WORKER_ADDRESS",
        description="Where gRPC listens: host:port, or unix:/path/to/socket.",
    )
    model_dir: str = Field(
        "models/tiny/checkpoint",
        validation_alias="GLM53_MODEL_DIR",
        description="Checkpoint directory: config.json, tokenizer, safetensors. Unset: the shipped one, wherever the start is.",
    )
    model_download: bool = Field(
        True,
        validation_alias="GLM53_MODEL_DOWNLOAD",
        description="Fetch GLM53_MODEL_REPO into GLM53_MODEL_DIR when there is no config.json; 0: never, the start fails instead.",
    )
    model_repo: str = Field(
        "turboderp/GLM-5.3-Flash-exl3",
        validation_alias="GLM53_MODEL_REPO",
        pattern=r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$",
        json_schema_extra={"accepts": "owner/name of a repository, each of letters, digits, ., _ and -, e.g. turboderp/GLM-5.3-Flash-exl3"},
        description="Repository on the hub, owner/name; another one than the default needs GLM53_MODEL_REVISION.",
    )
    model_revision: str = Field(
        "332ab457b709b7ba30dd9a448be5de03b80a7ac9",
        validation_alias="GLM53_MODEL_REVISION",
        pattern=r"^[0-9a-f]{40}$",
        json_schema_extra={
            "accepts": "a commit's 40 digits of 0-9 and a-f, no branch and no tag, e.g. 332ab457b709b7ba30dd9a448be5de03b80a7ac9"
        },
        description="Commit of the repository, 40 hexadecimal digits; a folder that holds another one is refused when this is set.",
    )
    served_name: str = Field(
        "",
        validation_alias="SERVED_NAME",
        max_length=128,
        description="Model name that clients ask for; empty: glm-5.3-flash for the real checkpoint, glm-5.3-tiny for the shipped one.",
    )
    mode: Literal["auto", "fast", "exact", "nvme", "nvme-exact"] = Field(
        "auto",
        validation_alias="GLM53_MODE",
        description="Tiers that serve the experts: auto takes fast on the CPU device and on GPUs where it was measured, else exact. The"
        " nvme modes are refused.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        validation_alias="GLM53_DEVICE",
        description="What computes the model: auto takes the GPU where exllamav3 and one are there.",
    )
    context_tokens: int = Field(
        0,
        validation_alias="GLM53_CONTEXT_TOKENS",
        ge=0,
        description="Most tokens of prompt and completion, at least 64; 0: min(16384 on the CPU, 32768 on a GPU, what the model has).",
    )
    cache_tokens: int = Field(
        131_072,
        validation_alias="GLM53_CACHE_TOKENS",
        ge=256,
        multiple_of=256,
        description="Tokens of the GPU's key-value cache, over all streams.",
    )
    chunk_size: int = Field(
        256,
        validation_alias="GLM53_CHUNK_SIZE",
        ge=16,
        le=8192,
        description="Prompt tokens of one prefill pass; on a GPU 8192 unless set, and at least 256.",
    )
    max_streams: int = Field(8, validation_alias="GLM53_MAX_STREAMS", ge=1, le=64, description="Most streams that decode at a time.")
    step_streams: int = Field(
        4,
        validation_alias="GLM53_STEP_STREAMS",
        ge=0,
        le=64,
        description="On a GPU: most streams in one pass of decode; more take turns within a step. 0: all GLM53_MAX_STREAMS.",
    )
    max_rq_tokens: int = Field(
        4096,
        validation_alias="GLM53_MAX_RQ_TOKENS",
        ge=1,
        le=1 << 20,
        description="On a GPU: tokens of an answer that cache pages are reserved for at admission; the rest takes page by page.",
    )
    max_queued: int = Field(64, validation_alias="GLM53_MAX_QUEUED", ge=1, le=100_000, description="Most requests that wait.")
    queue_timeout_s: float = Field(
        60.0,
        validation_alias="GLM53_QUEUE_TIMEOUT_S",
        gt=0,
        le=86_400,
        description="Longest wait in the queue, where the client names none.",
    )
    slow_reader_s: float = Field(
        30.0,
        validation_alias="GLM53_SLOW_READER_S",
        gt=0,
        le=3600,
        description="A stream whose gateway takes nothing for so long is ended; a gateway gives its own client GLM53_SLOW_CLIENT_S.",
    )
    stream_buffer_events: int = Field(
        256, validation_alias="GLM53_STREAM_BUFFER_EVENTS", ge=1, le=65_536, description="Events that may wait for one stream's reader."
    )
    prefix_cache_mb: int = Field(
        64,
        validation_alias="GLM53_PREFIX_CACHE_MB",
        ge=0,
        le=1_000_000,
        description="Host memory for states of earlier prompts (on the CPU answers too), MiB: the next turn computes what is new. 0: off.",
    )
    load_threads: int = Field(
        0,
        validation_alias="GLM53_LOAD_THREADS",
        ge=0,
        le=256,
        description="Threads that read the experts from the checkpoint; 0: one per processor, at most 16.",
    )
    backend_threads: int = Field(
        1,
        validation_alias="GLM53_BACKEND_THREADS",
        ge=1,
        le=256,
        description="Threads of the worker's own expert kernel on the CPU device.",
    )
    ec_max_slots: int = Field(
        0,
        validation_alias="GLM53_EC_MAX_SLOTS",
        ge=0,
        description="Most expert slots of the cache; 0: a third of the experts on the CPU, what fits into VRAM on a GPU.",
    )
    ec_admission: Literal["auto", "in_step", "between_steps"] = Field(
        "auto",
        validation_alias="GLM53_EC_ADMISSION",
        description="On a GPU: a missing expert is copied into a slot in the step that picked it, or read in place and copied after it.",
    )
    ec_copy: Literal["auto", "engine", "gather"] = Field(
        "auto",
        validation_alias="GLM53_EC_COPY",
        description="On a GPU, where missing experts are copied in the step: by the copy engine, or by a gather on the multiprocessors."
        " auto: measured at start, the gather where it is at least 3 % faster.",
    )
    ec_hints: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=MOST_HINTS)] = Field(
        "auto",
        validation_alias="GLM53_EC_HINTS",
        description="On a GPU, where missing experts are copied in the step: most that a guess of the next layer's picks brings ahead,"
        " 1 to 8; off: no guesses. auto: 3 in exact, off in fast, where the CPU lane leaves little to win.",
    )
    ec_reserve_gb: float = Field(
        1.0, validation_alias="GLM53_EC_RESERVE_GB", ge=0, le=1024, description="VRAM that expert slots leave free, GiB."
    )
    ec_elastic_gb: float = Field(
        ELASTIC_GB,
        validation_alias="GLM53_EC_ELASTIC_GB",
        ge=0,
        le=1024,
        description="On a GPU: most VRAM of expert slots that is lent to long prefills while they run, GiB; 0: their share stays free.",
    )
    force_vram: bool = Field(
        False, validation_alias="GLM53_FORCE_VRAM", description="Try a GPU with less than 23,000 MiB of VRAM instead of refusing it."
    )
    triton_pin: str = Field(
        "",
        validation_alias="GLM53_TRITON_PIN",
        description="On a GPU: file with the choices of Triton's kernels, made by a start that has none. Until there is one, those that "
        "are shipped for this GPU, else chosen anew each time.",
    )
    warm_up: bool = Field(
        True, validation_alias="GLM53_WARM_UP", description="On a GPU: compile and tune kernels at start instead of in the first requests."
    )
    ec_admit_after: int = Field(
        2, validation_alias="GLM53_EC_ADMIT_AFTER", ge=1, le=1000, description="An expert gets a slot when it is picked for this time."
    )
    expert_backend: Literal["shm", "in_process"] = Field(
        "shm",
        validation_alias="GLM53_EXPERT_BACKEND",
        description="Who computes the CPU lane: the cpu_expert process, or the worker itself.",
    )
    heat_file: str = Field("", validation_alias="GLM53_HEAT_FILE", description="Where experts' heat is kept over restarts; empty: nowhere.")
    ct_isa: Literal["auto", "scalar", "avx2", "avx512bw", "avx512vbmi", "avxvnni"] = Field(
        "auto", validation_alias="GLM53_CT_ISA", description="Instruction set of the expert kernels."
    )
    ct_numa_node: int = Field(
        -1,
        validation_alias="GLM53_CT_NUMA_NODE",
        ge=-1,
        le=1023,
        description="Memory node of the expert records and of cpu_expert's threads and buffers; -1: wherever the system puts them.",
    )
    ct_timeout_ms: int = Field(
        500,
        validation_alias="GLM53_CT_TIMEOUT_MS",
        ge=1,
        le=600_000,
        description="A CPU-lane job that takes longer is computed by the worker.",
    )
    ct_a: float | None = Field(
        None, validation_alias="GLM53_CT_A", ge=0, description="CPU lane: fixed cost of a job, microseconds; measured when unset."
    )
    ct_b: float | None = Field(
        None, validation_alias="GLM53_CT_B", ge=0, description="CPU lane: cost per expert, microseconds; measured when unset."
    )
    ct_tzc: float | None = Field(
        None, validation_alias="GLM53_CT_TZC", ge=0, description="Zero-copy cost per expert, microseconds; measured when unset."
    )
    drain_timeout_s: float = Field(
        30.0, validation_alias="GLM53_DRAIN_TIMEOUT_S", ge=0, le=3600, description="How long live streams may go on after SIGTERM."
    )
    watchdog_s: float = Field(
        60.0, validation_alias="GLM53_WATCHDOG_S", gt=0, le=3600, description="Work pending without progress for so long ends the worker."
    )
    otlp_endpoint: OptionalEndpoint = Field(
        "",
        validation_alias="GLM53_OTLP_ENDPOINT",
        description="Where OpenTelemetry spans go (OTLP over HTTP), e.g. http://collector:4318/v1/traces; needs `make setup-otel`.",
    )
    http_address: OptionalAddress = Field(
        "",
        validation_alias="GLM53_WORKER_HTTP",
        description="host:port where gpu_worker answers /metrics, /health/live and /health/ready; empty: nowhere.",
    )

    @property
    def model_folder(self) -> Path:
        """The checkpoint's folder: where none is named the shipped one, from whichever folder the server is started.

        Else a start from another folder would find nothing there and fetch 125 GB instead.
        """
        named = Path(self.model_dir)
        shipped = _TREE / named
        if self.is_set("model_dir") or (named / "config.json").exists() or not (shipped / "config.json").exists():
            return named
        return shipped

    @field_validator("context_tokens")
    @classmethod
    def _holds_a_prompt(cls, value: int) -> int:
        if 0 < value < LEAST_CONTEXT:
            raise ValueError(f"{value} tokens hold no prompt with its template and an answer: 0 or at least {LEAST_CONTEXT} is needed")
        return value

    @field_validator("worker_address")
    @classmethod
    def _check_address(cls, value: str) -> str:
        if value.startswith("unix:"):
            if len(value) <= len("unix:"):
                raise ValueError("unix: needs a path, e.g. unix:/run/glm53/worker.sock")
            return value
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) <= 65_535:
            raise ValueError("need host:port or unix:/path, e.g. 127.0.0.1:30051")
        return value
