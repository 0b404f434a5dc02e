"""`glm53 stream-rate`: does a stream deliver tokens when they are made?

For each prompt length one stream is read, and when its events come is judged by the times that the engine took between the same tokens,
by its own count (`glm53_inter_token_seconds`). A server, or a proxy before it, that holds tokens back and then sends them in a burst, be it
all at the end, fails; so does one that delivers slower than it generates. The server must have nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from services.common.errors import ConfigError
from services.common.lifecycle import ExitCode

# A whole prompt of the longest length may take minutes on a small machine.
_TIMEOUT_S = 900.0
# Delivery may take so much longer or shorter than generation over the whole stream,
_MAX_STRETCH = 1.10
# and so many seconds: a loaded machine takes the processor away from a reader, or from the gateway, for a tenth of a second now and then.
_SLACK_S = 0.15
# So many tokens may share a message, or messages a packet, however slowly they are made.
_COALESCED_TOKENS = 8
# A burst is what comes faster than all but this share of the tokens was made: an engine that pauses makes the rest of them no faster.
_QUICK_SHARE = 0.1
# A stream that takes the engine less time is no longer than what is tolerated; one is asked for that takes somewhat more.
_LEAST_S, _ASKED_S = 0.8, 1.2
# A loaded machine may stand still for longer than the slack once, and then hardly again; who holds tokens back does it every time.
_MOST_FAILURES, _MOST_STREAMS = 5, 8
# Token ids of the prompt: ordinary ones of every vocabulary.
_FIRST_ID, _NUM_IDS = 300, 400


@dataclass(frozen=True)
class Engine:
    """Times between two tokens as the engine counts them, of one stream or since its start.

    Attributes:
        total_s: their sum.
        count: how many they are.
        up_to: (seconds, how many are not longer), a histogram's buckets by their upper edges.
    """

    total_s: float
    count: float
    up_to: tuple[tuple[float, float], ...]

    def since(self, before: Engine) -> Engine:
        """What has been counted after `before`."""
        earlier = dict(before.up_to)
        up_to = tuple((edge, count - earlier.get(edge, 0.0)) for edge, count in self.up_to)
        return Engine(self.total_s - before.total_s, self.count - before.count, up_to)

    def not_longer_s(self, share: float) -> float:
        """The time that this share of them is not longer than, as well as the buckets tell it; never more than the mean."""
        mean_s, wanted, low, below = self.total_s / self.count, self.count * share, 0.0, 0.0
        for edge, count in self.up_to:
            if count >= wanted:
                return min(mean_s, low + (edge - low) * (wanted - below) / (count - below))
            low, below = edge, count
        return mean_s


@dataclass(frozen=True)
class Rate:
    """One stream.

    Attributes:
        prompt_tokens: length of the prompt, as the server counts.
        tokens: tokens delivered, the first one left out.
        delivery_s: from the first event with a token to the last.
        generation_s: the engine's time between its first token and its last.
        token_s: the engine's time for a token, pauses left out.
        burst_tokens: most tokens that came at once; those are left out that the engine makes meanwhile when it is quick.
        longest_gap_s: longest time between two events; 0 where there is one.
    """

    prompt_tokens: int
    tokens: int
    delivery_s: float
    generation_s: float
    token_s: float
    burst_tokens: float
    longest_gap_s: float

    @property
    def problems(self) -> list[str]:
        """Why it fails; empty when it passes."""
        found = []
        took = f"delivery took {self.delivery_s:.3f} s, generation {self.generation_s:.3f} s"
        if self.delivery_s > self.generation_s * _MAX_STRETCH + _SLACK_S:
            found.append(took)
        coalesced_s = _COALESCED_TOKENS * self.generation_s / self.tokens
        if self.delivery_s < (self.generation_s - coalesced_s) / _MAX_STRETCH - _SLACK_S:
            found.append(f"{took}: tokens were held back and came in a burst")
        if self.burst_tokens > _COALESCED_TOKENS + _SLACK_S / max(self.token_s, 1e-6):
            found.append(f"{self.burst_tokens:.0f} tokens came in a burst, where each takes the engine {self.token_s * 1000:.1f} ms")
        return found

    @property
    def verdict(self) -> str:
        """The word "ok", or why it fails."""
        if self.problems:
            return f"FAIL: {'; '.join(self.problems)}"
        if self.generation_s < _LEAST_S:
            return f"FAIL: too short to judge, ask for more --tokens: a generation of {_LEAST_S} s is needed"
        return "ok"


def add_parser(commands: Any) -> None:
    """Adds `stream-rate` to the command line."""
    parser = commands.add_parser("stream-rate", help="check that a running server delivers tokens when they are made")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default http://127.0.0.1:30000)")
    parser.add_argument("--key", default=None, help="API key, where the server asks for one")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream (default 128); more where those take under a second")
    parser.add_argument("--prompts", type=int, nargs="+", default=[0, 512, 8192], help="prompt lengths in tokens (default 0 512 8192)")


def run(args: argparse.Namespace) -> int:
    """Checks every length; the exit code is 1 when one fails.

    Raises:
        ConfigError: the server cannot be asked.
    """
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    failed = False
    base = args.url.rstrip("/").removesuffix("/v1")  # as `glm53 serve` prints it
    with httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT_S) as client:
        try:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]
            for length in args.prompts:
                rate, failures = judge(client, model, length, args.tokens)
                print(_line(rate, failures))
                failed = failed or rate.verdict != "ok"
        except httpx.HTTPStatusError as error:
            raise ConfigError(f"{args.url} answers {error.response.status_code}: {error.response.text[:300]}") from None
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ConfigError(f"{args.url} cannot be measured: {error}") from None
    return ExitCode.OK if not failed else 1


def judge(client: httpx.Client, model: Mapping[str, Any], prompt_tokens: int, tokens: int) -> tuple[Rate, int]:
    """A stream that is long enough to be judged, where the model's context has room for it, and how many failed before it.

    Args:
        client: asks the server.
        model: its entry in /v1/models.
        prompt_tokens: length of the prompt, at least one token.
        tokens: least length of the answer.
    """
    room = int(model.get("max_model_len") or 0) - max(1, prompt_tokens)
    failures = 0
    for _ in range(_MOST_STREAMS):
        rate = measure(client, model["id"], prompt_tokens, tokens)
        longer = math.ceil(tokens * _ASKED_S / max(rate.generation_s, 1e-3)) if rate.generation_s < _LEAST_S else tokens
        longer = max(tokens, min(longer, room) if room > 0 else longer)
        if rate.verdict == "ok" or (not rate.problems and longer == tokens):
            break
        failures += bool(rate.problems)
        if failures == _MOST_FAILURES:
            break
        tokens = longer
    return rate, failures


def measure(client: httpx.Client, model: str, prompt_tokens: int, tokens: int) -> Rate:
    """One stream of `tokens` tokens after a prompt of `prompt_tokens` (at least one)."""
    prompt = [_FIRST_ID + i % _NUM_IDS for i in range(max(1, prompt_tokens))]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    before = _engine(client)
    arrivals, known_prompt = _arrivals(client, body)
    engine = _engine(client).since(before)
    if not arrivals or arrivals[-1][1] < 2:
        raise ValueError("the stream had fewer than two tokens")
    first, last = arrivals[0][1], arrivals[-1][1]
    if not max(1, last - first) <= engine.count <= last + 1:
        raise ValueError(f"the engine made {engine.count:.0f} tokens meanwhile, the stream had {last - 1}: something else is running")
    return rate_of(arrivals, known_prompt, engine)


def rate_of(arrivals: Sequence[tuple[float, int]], prompt_tokens: int, engine: Engine) -> Rate:
    """The figures of one stream.

    Args:
        arrivals: (seconds, tokens so far) of every event, at least one.
        prompt_tokens: length of the prompt.
        engine: the times between its tokens.
    """
    (began, first), (ended, last) = arrivals[0], arrivals[-1]
    quick_s = engine.not_longer_s(_QUICK_SHARE)
    # The tokens that a reader who got them as they were made would be ahead by: what comes adds to them, time takes from them.
    ahead, burst = float(first), float(first)
    for (then, had), (now, has) in itertools.pairwise(arrivals):
        ahead = max(0.0, ahead - (now - then) / max(quick_s, 1e-6)) + has - had
        burst = max(burst, ahead)
    return Rate(
        prompt_tokens=prompt_tokens,
        tokens=last - 1,
        delivery_s=ended - began,
        # Those in the first event count too: they are late when there are many.
        generation_s=engine.total_s * (last - 1) / engine.count,
        token_s=engine.not_longer_s(0.5),
        burst_tokens=burst,
        longest_gap_s=max((now[0] - then[0] for then, now in itertools.pairwise(arrivals)), default=0.0),
    )


def _arrivals(client: httpx.Client, body: dict[str, Any]) -> tuple[list[tuple[float, int]], int]:
    arrivals: list[tuple[float, int]] = []
    prompt_tokens = 0
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(response.read().decode(errors="replace")[:300])
        for event in _events(response):
            if "error" in event:
                raise ValueError(event["error"]["message"])
            usage = event.get("usage") or {}
            prompt_tokens = usage.get("prompt_tokens", prompt_tokens)
            if event["choices"] and usage.get("completion_tokens", 0) > (arrivals[-1][1] if arrivals else 0):
                arrivals.append((time.monotonic(), usage["completion_tokens"]))
    return arrivals, prompt_tokens


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _engine(client: httpx.Client) -> Engine:
    """What the engine has counted until now."""
    total = count = 0.0
    up_to: dict[float, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").raise_for_status().text):
        if family.name != "glm53_inter_token_seconds":
            continue
        for sample in family.samples:
            if sample.name.endswith("_sum"):
                total += sample.value
            elif sample.name.endswith("_count"):
                count += sample.value
            elif sample.name.endswith("_bucket") and sample.labels["le"] != "+Inf":
                edge = float(sample.labels["le"])
                up_to[edge] = up_to.get(edge, 0.0) + sample.value
    return Engine(total, count, tuple(sorted(up_to.items())))


def _line(rate: Rate, failures: int) -> str:
    speed = rate.tokens / max(rate.delivery_s, rate.generation_s, 1e-6)  # a burst is no speed
    again = f", after {failures} that failed" if failures and rate.verdict == "ok" else ""
    return (
        f"prompt {rate.prompt_tokens:6}  {rate.tokens:5} tokens  {speed:7.1f} tok/s  delivery {rate.delivery_s:.3f} s  "
        f"generation {rate.generation_s:.3f} s  longest gap {rate.longest_gap_s * 1000:.1f} ms  {rate.verdict}{again}"
    )
