"""What `glm53 stream-rate` makes of streams that are delivered as they are made, and of streams that are not."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cli import stream_rate
from cli.main import main as glm53
from cli.stream_rate import Engine, Rate, rate_of
from services.gpu_worker.metrics import _SECONDS

# (seconds, tokens so far) of every event.
Arrivals = list[tuple[float, int]]
TOKENS = 128


def made(gaps: Sequence[float]) -> list[float]:
    """When each token was made: the first one at 0."""
    return [0.0, *itertools.accumulate(gaps)]


def counted(gaps: Sequence[float]) -> Engine:
    """What the engine's metrics say of the times between tokens."""
    return Engine(sum(gaps), len(gaps), tuple((edge, float(sum(gap <= edge for gap in gaps))) for edge in _SECONDS))


def delivered(times: Sequence[float], *, late_from: float = 0.0, late_until: float = 0.0, batch: int = 1) -> Arrivals:
    """An event for each token: those made in between come at `late_until`, and every `batch` of them with the last of it."""
    held = [late_until if late_from <= at < late_until else at for at in times]
    return [(held[min(i // batch * batch + batch, len(held)) - 1], i + 1) for i in range(len(held))]


def coalesced(arrivals: Arrivals) -> Arrivals:
    """The same with one event for what comes at one time."""
    return [(at, max(count for _, count in group)) for at, group in itertools.groupby(arrivals, key=lambda event: event[0])]


def judged(gaps: Sequence[float], arrivals: Arrivals) -> Rate:
    """The figures of a stream whose arrivals, and the same coalesced, are judged alike."""
    rate, one_event = rate_of(arrivals, 5, counted(gaps)), rate_of(coalesced(arrivals), 5, counted(gaps))
    assert bool(rate.problems) == bool(one_event.problems)
    return rate


PACES = pytest.mark.parametrize("pace_s", [0.002, 0.011, 0.024, 0.1, 0.7])


@PACES
@pytest.mark.parametrize("tokens", [2, 16, TOKENS, 512])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_stream_that_is_delivered_as_it_is_made_passes(pace_s: float, tokens: int, batch: int) -> None:
    """Token by token, or in messages of eight, at every pace and length."""
    gaps = [pace_s] * (tokens - 1)
    rate = judged(gaps, delivered(made(gaps), batch=batch))
    assert rate.problems == []
    assert rate.tokens == tokens - 1
    assert rate.generation_s == pytest.approx(sum(gaps))


@PACES
def test_a_stream_that_is_held_back_fails(pace_s: float) -> None:
    """All at the end, the first half in one burst, the last half in one burst, every quarter: whatever a buffer does."""
    gaps = [pace_s] * (511 if pace_s < 0.01 else 127)
    times, whole = made(gaps), sum(gaps)
    for late_from, late_until in ((0, whole), (0, whole / 2), (whole / 2, whole), (whole / 4, whole / 2)):
        (problem, *_) = judged(gaps, delivered(times, late_from=late_from, late_until=late_until)).problems
        assert "burst" in problem
    assert judged(gaps, delivered(times, batch=128 if pace_s < 0.01 else 32)).problems


def test_the_buffering_proxy_that_was_passed_fails() -> None:
    """127 tokens within a quarter of a millisecond, a quarter of a second after they were begun, as one event or as many."""
    gaps = [0.002] * 127
    rate = judged(gaps, [(i * 2e-6, i + 1) for i in range(128)])
    assert "delivery took 0.000 s, generation 0.254 s: tokens were held back" in rate.problems[0]
    assert rate_of([(1.0, 128)], 5, counted(gaps)).problems


@PACES
def test_a_slow_delivery_fails(pace_s: float) -> None:
    """Half the speed of the engine."""
    gaps = [pace_s] * 127
    (problem,) = judged(gaps, [(2 * at, i + 1) for i, at in enumerate(made(gaps))]).problems
    assert problem.startswith("delivery took")


@PACES
@pytest.mark.parametrize("pause_at", [1, 20, 64, 126])
def test_a_loaded_host_passes(pace_s: float, pause_at: int) -> None:
    """A reader that gets no processor for a tenth of a second, an engine that stops for one and two thirds of one, and both."""
    gaps = [pace_s] * 127
    late = pause_at * pace_s
    assert judged(gaps, delivered(made(gaps), late_from=late, late_until=late + 0.1)).problems == []
    gaps[pause_at] += 0.66
    times = made(gaps)
    assert judged(gaps, delivered(times)).problems == []
    late = times[pause_at // 2]
    assert judged(gaps, delivered(times, late_from=late, late_until=late + 0.1)).problems == []


def test_an_engine_whose_pace_changes_passes() -> None:
    """Longer contexts cost more, another program takes processors for a while: what was quick before is no burst."""
    for gaps in ([0.01 + 0.0001 * i for i in range(511)], [0.002] * 64 + [0.006] * 63, [0.02] * 100 + [0.1] * 100):
        assert judged(gaps, delivered(made(gaps))).problems == []
        assert judged(gaps[::-1], delivered(made(gaps[::-1]))).problems == []


# ---- the whole command, with a server that is none of ours -----------------------------------------------------------------------------


@contextlib.contextmanager
def server(gaps: Sequence[float], *plans: Arrivals) -> Iterator[str]:
    """A server whose engine says it took `gaps`, and whose streams come by `plans`, the last one for good; yields its address."""
    asked_for: list[int] = []
    registry = CollectorRegistry()
    between = Histogram("glm53_inter_token_seconds", "Between two tokens.", buckets=_SECONDS, registry=registry)
    between.observe(3.0)  # of an earlier stream

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = json.dumps({"data": [{"id": "m"}]}).encode() if self.path == "/v1/models" else generate_latest(registry)
            self.answer()
            self.wfile.write(text)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked_for.append(asked["max_tokens"])
            plan = plans[min(len(asked_for), len(plans)) - 1]
            self.answer()
            began = time.monotonic()
            for at, events in itertools.groupby(plan, key=lambda event: event[0]):
                time.sleep(max(0.0, began + at - time.monotonic()))
                usage: dict[str, Any] = {"prompt_tokens": len(asked["prompt"])}
                said = [{"choices": [{"text": "x"}], "usage": {**usage, "completion_tokens": count}} for _, count in events]
                self.wfile.write(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in said))
            for gap in gaps:
                between.observe(gap)
            self.wfile.write(b"data: [DONE]\n\n")

        def answer(self) -> None:
            self.send_response_only(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made_server:
        thread = threading.Thread(target=made_server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{made_server.server_address[1]}"
        finally:
            made_server.shutdown()
            thread.join()


STEADY = [0.01] * (TOKENS - 1)
WHOLE_S = sum(STEADY)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("gaps", "plan", "said"),
    [
        (STEADY, delivered(made(STEADY)), "ok"),
        (STEADY, delivered(made(STEADY), batch=8), "ok"),
        (STEADY, coalesced(delivered(made(STEADY), batch=8)), "ok"),
        (STEADY, delivered(made(STEADY), late_from=0.4, late_until=0.5), "ok"),
        (STEADY, delivered(made(STEADY), late_from=WHOLE_S - 0.1, late_until=WHOLE_S), "ok"),
        (STEADY, delivered(made(STEADY), late_until=WHOLE_S), "FAIL: delivery took 0.0"),
        (STEADY, coalesced(delivered(made(STEADY), late_until=WHOLE_S)), "FAIL: delivery took 0.0"),
        (STEADY, delivered(made(STEADY), late_until=WHOLE_S / 2), "came in a burst"),
        (STEADY, coalesced(delivered(made(STEADY), late_until=WHOLE_S / 2)), "came in a burst"),
        (STEADY, delivered(made(STEADY), late_from=WHOLE_S / 2, late_until=WHOLE_S), "came in a burst"),
        (STEADY, [(1.5 * at, count) for at, count in delivered(made(STEADY))], "FAIL: delivery took 1.9"),
    ],
    ids=[
        "steady", "messages of 8", "events of 8", "jitter", "jitter at the end", "buffered", "buffered into one event", "first half late",
        "first half late in one event", "second half late", "slow",
    ],
)  # fmt: skip
def test_the_command_judges_by_the_engines_time(
    gaps: list[float], plan: Arrivals, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 and "ok", or 1 and the reason, for every way to deliver the same tokens."""
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    monkeypatch.setattr(stream_rate, "_MOST_FAILURES", 1)
    with server(gaps, plan) as url:
        code = glm53(["stream-rate", "--url", url, "--tokens", str(TOKENS), "--prompts", "7"])
    (line,) = capsys.readouterr().out.splitlines()
    assert said in line
    assert code == (0 if said == "ok" else 1)
    assert line.startswith("prompt      7    127 tokens")


@pytest.mark.alone
def test_one_that_fails_is_read_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine that stood still once is no fault, and is told; a server that holds tokens back does so every time."""
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    steady, held = delivered(made(STEADY)), delivered(made(STEADY), late_until=WHOLE_S)
    # A busy machine may stand still for the second reading too.
    for plans, code, said in (((held, steady), 0, r"ok, after [1-4] that failed$"), ((held,), 1, "came in a burst")):
        with server(STEADY, *plans) as url:
            assert glm53(["stream-rate", "--url", url, "--prompts", "0"]) == code
        (line,) = capsys.readouterr().out.splitlines()
        assert re.search(said, line)


class Streams:
    """Streams of an engine that makes a token in a millisecond, delivered well or all at the end; notes what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, buffered: bool) -> None:
        self.asked: list[int] = []
        self._buffered = buffered
        monkeypatch.setattr(stream_rate, "measure", self.measure)

    def measure(self, _client: object, _model: str, prompt_tokens: int, tokens: int) -> Rate:
        self.asked.append(tokens)
        gaps = [0.001] * (tokens - 1)
        return rate_of(delivered(made(gaps), late_until=sum(gaps) if self._buffered else 0.0), prompt_tokens, counted(gaps))


@pytest.mark.parametrize("buffered", [True, False])
def test_a_stream_that_is_too_short_to_judge_is_made_longer(monkeypatch: pytest.MonkeyPatch, buffered: bool) -> None:
    """A quick engine's default stream is over before anybody can tell a buffer from a loaded machine."""
    streams = Streams(monkeypatch, buffered=buffered)
    rate, failures = stream_rate.judge(httpx.Client(), {"id": "m", "max_model_len": 16_384}, 0, 128)
    assert streams.asked[:2] == [128, 1210]
    assert bool(rate.problems) is buffered
    assert failures == (stream_rate._MOST_FAILURES if buffered else 0)


def test_what_cannot_be_judged_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that has no room for a longer stream."""
    streams = Streams(monkeypatch, buffered=True)
    rate, _ = stream_rate.judge(httpx.Client(), {"id": "m", "max_model_len": 160}, 20, 128)
    assert streams.asked == [128, 140]
    assert "too short to judge" in rate.verdict


def test_a_server_that_does_something_else_meanwhile_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine's time would be that of other streams too."""
    monkeypatch.setattr("cli.main.configure_logging", lambda *_: None)
    gaps = [0.001] * 15
    with server(gaps * 3, delivered(made(gaps))) as url:
        assert glm53(["stream-rate", "--url", url, "--prompts", "0"]) == 78
    assert "something else is running" in caplog.text


def test_the_slack_is_less_than_anybody_takes_for_a_steady_stream() -> None:
    """A quarter of a second without a token is seen by whoever reads."""
    assert stream_rate._SLACK_S <= 0.2
