"""One whole stack on a GPU machine: `python -m bench.gpu_serve`. Starts `glm53 serve` and asks it; exit 0 when every answer is right."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench import server

MODEL = "glm-5.3-tiny"
QUESTION = "What is the capital of France?"


def ask(url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, **fields}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return dict(json.load(reply))


def stream(url: str, **fields: Any) -> tuple[str, float]:
    """(answer, seconds to the first text)."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "stream": True, **fields}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    text, first, began = "", 0.0, time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
                first = first or (time.monotonic() - began if text else 0.0)
    return text, first


def check(url: str) -> dict[str, Any]:
    plain = ask(url, temperature=0)
    answer = plain["choices"][0]["message"]["content"]
    streamed, first_s = stream(url, temperature=0)
    seeded = [ask(url, temperature=1.0, seed=7)["choices"][0]["message"]["content"] for _ in range(2)]
    scored = ask(url, temperature=0, logprobs=True, top_logprobs=3, max_tokens=4)["choices"][0]["logprobs"]["content"]
    return {
        "answer": answer,
        "streamed_equals_plain": streamed == answer,
        "first_text_s": round(first_s, 3),
        "same_seed_same_answer": seeded[0] == seeded[1],
        "logprob_of_first": scored[0]["logprob"],
        "logprobs_are_ranked": all(t["top_logprobs"][0]["logprob"] >= t["logprob"] for t in scored),
        "usage": plain["usage"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--slots", default="24")
    parser.add_argument("--admission", default="auto", choices=("auto", "in_step", "between_steps"))
    parser.add_argument("--no-warm-up", action="store_true", help="ready sooner, but the first request waits for kernels to be compiled")
    parser.add_argument("--ready-timeout", type=float, default=540.0, help="seconds; a machine's first start compiles kernels")
    args = parser.parse_args()
    env = {
        "GLM53_DEVICE": args.device,
        "GLM53_MODE": "exact",
        "GLM53_EC_MAX_SLOTS": args.slots,
        "GLM53_EC_ADMISSION": args.admission,
        "GLM53_WARM_UP": str(int(not args.no_warm_up)),
        "GLM53_CACHE_TOKENS": "32768",
        "GLM53_CONTEXT_TOKENS": "4096",
    }
    with tempfile.TemporaryDirectory(prefix="glm53-gpu-serve-") as work:
        began = time.monotonic()
        running = server.start(Path(work), env=env, wait=False)
        try:
            running.wait_ready(args.ready_timeout)
            result = {"ready_s": round(time.monotonic() - began, 1), **check(running.url)}
            stats = running.get_json("/stats")
            result["device"], result["cache"] = stats.get("device"), stats.get("expert_cache")
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{error}: {error.read().decode()}\n{running.tail()}") from None
        finally:
            running.stop()
            log = running.log.read_text()
    print(json.dumps(result, indent=1))
    good = (
        result["streamed_equals_plain"]
        and result["same_seed_same_answer"]
        and result["logprobs_are_ranked"]
        and "Paris" in result["answer"]
    )
    if not good:
        print(log[-6000:])
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
