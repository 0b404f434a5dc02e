"""Flags of `glm53 serve` become settings of the right name and unit."""

from __future__ import annotations

import pytest

from cli import main
from services.common.lifecycle import ExitCode
from services.gpu_worker.settings import GpuWorkerSettings


def settings_of(*flags: str) -> GpuWorkerSettings:
    args = main.build_parser().parse_args(["serve", *flags])
    return GpuWorkerSettings.load({name: str(value) for _, name, _ in main.SERVE_FLAGS if (value := getattr(args, name)) is not None})


def test_the_flags_that_users_of_exllamav3_know() -> None:
    """KV tokens, streams, streams of a pass, chunk, and gigabytes of states."""
    settings = settings_of(
        "-cs",
        "65536",
        "--max-batch-size",
        "6",
        "-ambs",
        "3",
        "-chunk_size",
        "4096",
        "-rcs",
        "1.5",
        "--context",
        "20000",
        "--max-rq-tokens",
        "2048",
    )
    assert settings.cache_tokens == 65_536
    assert settings.max_streams == 6
    assert settings.step_streams == 3
    assert settings.chunk_size == 4096
    assert settings.prefix_cache_mb == 1536
    assert settings.context_tokens == 20_000
    assert settings.max_rq_tokens == 2048


def test_their_defaults() -> None:
    """Room for 131,072 tokens, eight streams, four in a pass, 4,096 tokens of an answer reserved."""
    settings = settings_of()
    assert (settings.cache_tokens, settings.max_streams, settings.step_streams, settings.max_rq_tokens) == (131_072, 8, 4, 4096)


@pytest.mark.parametrize("value", ["much", "inf", ""])
def test_no_number_of_gigabytes(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused by the flag's name."""
    with pytest.raises(SystemExit):
        settings_of("-rcs", value)
    assert "argument -rcs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--device", "gpu"], {}, "GLM53_DEVICE: need auto, cpu or cuda (it is gpu)"),
        (["--context", "10"], {}, "GLM53_CONTEXT_TOKENS: 10 tokens hold no prompt"),
        (["--host", "0.0.0.0"], {"GLM53_API_KEYS_FILE": ""}, "HOST is 0.0.0.0, which other machines may reach, but no API keys"),
        ([], {"GLM53_MAX_BODY_BYTES": "much"}, "GLM53_MAX_BODY_BYTES: "),
        ([], {"GLM53_CT_THREADS": "-1"}, "GLM53_CT_THREADS: "),
    ],
)
def test_what_a_service_would_refuse_is_refused_before_any_starts(
    flags: list[str], env: dict[str, str], said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line with the setting's name, not somewhere between the lines of the three."""
    monkeypatch.setattr(main, "configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(main, "Supervisor", lambda *_: pytest.fail("it starts"))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main.main(["serve", *flags]) == ExitCode.CONFIG
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert said in caplog.text
