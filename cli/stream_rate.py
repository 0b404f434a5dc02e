"""`glm53 stream-rate`: does a stream deliver tokens when they are made?

For each prompt length one stream is read and the time between its events is compared with the time that the engine took between the
same tokens, by its own count (`glm53_inter_token_seconds`). A server that holds tokens back and then sends them in a burst, or delivers
slower than it generates, fails. The server must have nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from services.common.errors import ConfigError
from services.common.lifecycle import ExitCode

# A whole prompt of the longest length may take minutes on a small machine.
_TIMEOUT_S = 900.0
# Delivery may take so much longer than generation over the whole stream, or so many seconds where the stream is short.
_MAX_STRETCH = 1.10
_SLACK_S = 0.05
# In the last twentieth of the stream's time no more tokens may come than one and a half times what its usual pace allows, and a few.
_LAST_PART = 0.05
_MAX_BURST, _BURST_SLACK_TOKENS = 1.5, 4
# Token ids of the prompt: ordinary ones of every vocabulary.
_FIRST_ID, _NUM_IDS = 300, 400


@dataclass(frozen=True)
class Rate:
    """One stream.

    Attributes:
        prompt_tokens: length of the prompt, as the server counts.
        tokens: tokens delivered after the first event.
        delivery_s: from the first event with a token to the last.
        generation_s: the engine's time between the same tokens.
        last_tokens: tokens that came in the last twentieth of `delivery_s`.
        usual_last_tokens: tokens that come in such a time at the stream's usual (median) pace.
        longest_gap_s: longest time between two events.
    """

    prompt_tokens: int
    tokens: int
    delivery_s: float
    generation_s: float
    last_tokens: int
    usual_last_tokens: float
    longest_gap_s: float

    @property
    def problems(self) -> list[str]:
        """Why it fails; empty when it passes."""
        found = []
        if self.delivery_s > self.generation_s * _MAX_STRETCH + _SLACK_S:
            found.append(f"delivery took {self.delivery_s:.3f} s, generation {self.generation_s:.3f} s")
        if self.last_tokens > self.usual_last_tokens * _MAX_BURST + _BURST_SLACK_TOKENS:
            found.append(f"{self.last_tokens} tokens came in a burst at the end, where {self.usual_last_tokens:.1f} are usual")
        return found


def add_parser(commands: Any) -> None:
    """Adds `stream-rate` to the command line."""
    parser = commands.add_parser("stream-rate", help="check that a running server delivers tokens when they are made")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default http://127.0.0.1:30000)")
    parser.add_argument("--key", default=None, help="API key, where the server asks for one")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream (default 128)")
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
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            for length in args.prompts:
                rate = measure(client, model, length, args.tokens)
                print(_line(rate))
                failed = failed or bool(rate.problems)
        except httpx.HTTPStatusError as error:
            raise ConfigError(f"{args.url} answers {error.response.status_code}: {error.response.text[:300]}") from None
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ConfigError(f"{args.url} cannot be measured: {error}") from None
    return ExitCode.OK if not failed else 1


def measure(client: httpx.Client, model: str, prompt_tokens: int, tokens: int) -> Rate:
    """One stream of `tokens` tokens after a prompt of `prompt_tokens` (at least one)."""
    prompt = [_FIRST_ID + i % _NUM_IDS for i in range(max(1, prompt_tokens))]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    before = _engine_time(client)
    arrivals, known_prompt = _arrivals(client, body)
    after = _engine_time(client)
    if len(arrivals) < 2:
        raise ValueError(f"the stream had {len(arrivals)} events with tokens")
    made = after[1] - before[1]
    counted = arrivals[-1][1] - arrivals[0][1]
    if not counted <= made <= counted + arrivals[0][1] + 1:
        raise ValueError(f"the engine made {made} tokens meanwhile, the stream had {counted}: something else is running")
    return rate_of(arrivals, known_prompt, (after[0] - before[0]) * counted / made)


def rate_of(arrivals: Sequence[tuple[float, int]], prompt_tokens: int, generation_s: float) -> Rate:
    """The figures of one stream.

    Args:
        arrivals: (seconds, tokens so far) of every event.
        prompt_tokens: length of the prompt.
        generation_s: the engine's time between the tokens of the first event and the last.
    """
    began, first = arrivals[0]
    ended, last = arrivals[-1]
    border = ended - _LAST_PART * (ended - began)
    before = max((count for at, count in arrivals if at < border), default=first)
    gaps = [after[0] - at[0] for at, after in itertools.pairwise(arrivals)]
    pace_s = statistics.median((after[0] - at[0]) / (after[1] - at[1]) for at, after in itertools.pairwise(arrivals))
    return Rate(
        prompt_tokens=prompt_tokens,
        tokens=last - first,
        delivery_s=ended - began,
        generation_s=generation_s,
        last_tokens=last - before,
        usual_last_tokens=_LAST_PART * (ended - began) / max(pace_s, 1e-6),
        longest_gap_s=max(gaps),
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


def _engine_time(client: httpx.Client) -> tuple[float, float]:
    """(seconds between tokens, number of such times) that the engine has counted until now."""
    total = count = 0.0
    for family in text_string_to_metric_families(client.get("/metrics").raise_for_status().text):
        if family.name == "glm53_inter_token_seconds":
            total += sum(sample.value for sample in family.samples if sample.name.endswith("_sum"))
            count += sum(sample.value for sample in family.samples if sample.name.endswith("_count"))
    return total, count


def _line(rate: Rate) -> str:
    speed = rate.tokens / rate.delivery_s
    verdict = "FAIL: " + "; ".join(rate.problems) if rate.problems else "ok"
    return (
        f"prompt {rate.prompt_tokens:6}  {rate.tokens:5} tokens  {speed:7.1f} tok/s  delivery {rate.delivery_s:.3f} s  "
        f"generation {rate.generation_s:.3f} s  longest gap {rate.longest_gap_s * 1000:.1f} ms  {verdict}"
    )
