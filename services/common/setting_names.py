"""Every environment name that any service or tool of ours reads.

One list for all, because `glm53 serve` hands one environment to three processes and each must tell a typo from a neighbour's setting.
tests/unit/test_settings.py holds it equal to the union of the settings classes.
"""

from __future__ import annotations

# Without the GLM53_ prefix, named so by the people who used the first deployments.
UNPREFIXED: frozenset[str] = frozenset({"HOST", "PORT", "SERVED_NAME"})

PREFIXED: frozenset[str] = frozenset(
    {
        # several services
        "GLM53_INSTANCE",
        "GLM53_LOG_FORMAT",
        "GLM53_LOG_LEVEL",
        "GLM53_OTLP_ENDPOINT",
        "GLM53_SHM_DIR",
        "GLM53_WORKER_ADDRESS",
        # gateway
        "GLM53_ALLOW_PUBLIC_WITHOUT_KEYS",
        "GLM53_API_KEYS_FILE",
        "GLM53_BODY_TIMEOUT_S",
        "GLM53_CONNECT_TIMEOUT_S",
        "GLM53_CORS_ORIGINS",
        "GLM53_DEFAULT_REASONING_EFFORT",
        "GLM53_HEADER_TIMEOUT_S",
        "GLM53_KEEPALIVE_S",
        "GLM53_MAX_BODY_BYTES",
        "GLM53_MAX_CONNECTIONS",
        "GLM53_MAX_HEADER_BYTES",
        "GLM53_MAX_MESSAGES",
        "GLM53_MAX_TOOLS",
        "GLM53_REASONING_FIELDS",
        "GLM53_REDIS_TIMEOUT_MS",
        "GLM53_REDIS_URL",
        "GLM53_REPLICAS",
        "GLM53_REQUEST_TIMEOUT_S",
        "GLM53_RESPONSE_TTL_S",
        "GLM53_SLOW_CLIENT_S",
        "GLM53_THINKING_OFF_POLICY",
        "GLM53_USAGE_FILE",
        "GLM53_WORKER_METRICS",
        # gpu_worker
        "GLM53_BACKEND_THREADS",
        "GLM53_CACHE_TOKENS",
        "GLM53_CONTEXT_TOKENS",
        "GLM53_CHUNK_SIZE",
        "GLM53_DEVICE",
        "GLM53_EC_ADMISSION",
        "GLM53_EC_ADMIT_AFTER",
        "GLM53_EC_COPY",
        "GLM53_EC_ELASTIC_GB",
        "GLM53_EC_HINTS",
        "GLM53_EC_MAX_SLOTS",
        "GLM53_EC_RESERVE_GB",
        "GLM53_EXPERT_BACKEND",
        "GLM53_FORCE_VRAM",
        "GLM53_HEAT_FILE",
        "GLM53_LOAD_THREADS",
        "GLM53_MAX_QUEUED",
        "GLM53_MAX_RQ_TOKENS",
        "GLM53_MAX_STREAMS",
        "GLM53_MODE",
        "GLM53_MODEL_DIR",
        "GLM53_MODEL_DOWNLOAD",
        "GLM53_MODEL_REPO",
        "GLM53_MODEL_REVISION",
        "GLM53_PREFIX_CACHE_MB",
        "GLM53_QUEUE_TIMEOUT_S",
        "GLM53_SLOW_READER_S",
        "GLM53_STEP_STREAMS",
        "GLM53_STREAM_BUFFER_EVENTS",
        "GLM53_TRITON_PIN",
        "GLM53_WARM_UP",
        "GLM53_WATCHDOG_S",
        "GLM53_WORKER_HTTP",
        # cpu_expert and the CPU lane
        "GLM53_CT_A",
        "GLM53_CT_B",
        "GLM53_CT_CPUS",
        "GLM53_CT_ISA",
        "GLM53_CT_NUMA_NODE",
        "GLM53_CT_THREADS",
        "GLM53_CT_TIMEOUT_MS",
        "GLM53_CT_TZC",
        "GLM53_EXPERT_HTTP",
        # supervisor
        "GLM53_BOOT_TIMEOUT_S",
        "GLM53_DRAIN_TIMEOUT_S",
        "GLM53_LIVENESS_CHECKS",
        "GLM53_LIVENESS_PERIOD_S",
        "GLM53_ROOT",
        "GLM53_STATE_DIR",
    }
)

ALL: frozenset[str] = PREFIXED | UNPREFIXED
