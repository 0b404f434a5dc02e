"""Whether two ways to serve a checkpoint give the same distributions: `python -m bench.score_panel`. Teacher-forced, by the Score path.

Eight texts are scored by a server of each kind, one after the other (a GPU holds one), with the most probable tokens of every position.
Top-1 is the share of positions whose most probable token is the same; KL is over the first side's listed tokens, all others being one more.

    python -m bench.score_panel --a GLM53_MODE=exact --b GLM53_MODE=fast
    python -m bench.score_panel --a GLM53_DEVICE=cuda,GLM53_EC_MAX_SLOTS=1 --b GLM53_DEVICE=cuda --model-dir /models/flash
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import grpc
import tokenizers

from bench import report, server
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc

TOP = 20
SCORE_TIMEOUT_S = 300.0
TEXTS = (
    "The river had risen in the night. By morning the lower meadow was a lake, and the gate stood in it up to the "
    "second bar. Nobody in the village remembered such a spring, although every one of them said, as they did each "
    "year, that the winters had been harder once.",
    "def moving_average(values, width):\n    if width < 1:\n        raise ValueError('width must be positive')\n    "
    "total, out = 0.0, []\n    for i, value in enumerate(values):\n        total += value\n        if i >= width:\n    "
    "        total -= values[i - width]\n        if i >= width - 1:\n            out.append(total / width)\n    "
    "return out\n",
    '{"order": 4711, "customer": {"name": "Ada", "since": 2019}, "items": [{"sku": "A-1", "count": 3, "price": '
    '2.5}, {"sku": "B-9", "count": 1, "price": 40.0}], "paid": true, "note": null, "address": {"street": "Mill '
    'Lane 7", "city": "Leeds", "code": "LS1 4AP"}}',
    "Der Zug hielt auf freier Strecke. Nach einer Weile ging der Schaffner durch die Wagen und sagte, es dauere "
    "nur wenige Minuten; das hatte er schon einmal gesagt, und niemand sah von seiner Zeitung auf. Draußen stand "
    "ein Reh im Feld und schaute.",
    "Question: A tank holds 240 litres and loses 3 litres each hour through a leak, while a pump adds 11 litres "
    "each hour. It starts one third full. After how many hours is it full? Answer: It starts with 80 litres and "
    "gains 8 litres an hour, so it needs 160 / 8 = 20 hours.",
    "What is the capital of France? Paris. What is the capital of Japan? Tokyo. What is the capital of Kenya? "
    "Nairobi. What is 17 + 25? 42. What is 9 + 8? 17. Say hello in Spanish: hola. Spell cat backwards: tac. Which "
    "is larger, 31 or 13? 31.",
    "SELECT c.name, COUNT(*) AS orders, SUM(o.total) AS spent FROM customers AS c JOIN orders AS o ON "
    "o.customer_id = c.id WHERE o.placed >= '2026-01-01' AND o.state <> 'cancelled' GROUP BY c.name HAVING "
    "COUNT(*) > 2 ORDER BY spent DESC, c.name LIMIT 20;",
    "Minutes of the meeting: the bridge is to be closed from Monday to Thursday; the baker asked who would pay for "
    "the detour; the council answered that the county would; the baker asked for that in writing; it was agreed "
    "that the clerk writes to the county, again.",
)
Position = dict[str, Any]


def parse_env(text: str) -> dict[str, str]:
    """`NAME=value,NAME=value` as an environment. Raises ArgumentTypeError."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if any(not middle or not name.startswith("GLM53_") for name, middle, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: need GLM53_NAME=value, separated by commas")
    return {name: value for name, _, value in pairs}


def score(address: str, prompts: list[list[int]]) -> list[list[Position]]:
    """Every position of every prompt but the first: its log-probabilities by token, most probable first."""
    out = []
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.WorkerStub(channel)
        for number, ids in enumerate(prompts):
            request = pb.ScoreRequest(request_id=f"panel-{number}", token_ids=ids, first_scored=1, top=TOP)
            tokens = stub.Score(request, timeout=SCORE_TIMEOUT_S).tokens
            out.append([{"token": t.id, "logprob": t.logprob, "top": {c.token_id: c.logprob for c in t.top}} for t in tokens])
    return out


def kl(a: dict[int, float], b: dict[int, float]) -> float:
    """KL divergence in nats of two lists of log-probabilities, over a's tokens that b lists too, and one more for all others."""
    shared = [token for token in a if token in b]
    p, q = [math.exp(a[t]) for t in shared], [math.exp(b[t]) for t in shared]
    rest_p, rest_q = max(0.0, 1 - sum(p)), max(0.0, 1 - sum(q))
    total = sum(x * (a[t] - b[t]) for x, t in zip(p, shared, strict=True))
    if rest_p > 1e-6 and rest_q > 1e-6:
        total += rest_p * math.log(rest_p / rest_q)
    return max(0.0, total)


def compare(a: list[list[Position]], b: list[list[Position]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a row for each prompt, the summary)."""
    rows = []
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        if len(one) != len(other):
            raise ValueError(f"prompt {number}: {len(one)} positions on one side, {len(other)} on the other")
        divergences = [kl(x["top"], y["top"]) for x, y in zip(one, other, strict=True)]
        same = [max(x["top"], key=x["top"].get) == max(y["top"], key=y["top"].get) for x, y in zip(one, other, strict=True)]
        differences = [abs(x["logprob"] - y["logprob"]) for x, y in zip(one, other, strict=True)]
        rows.append(
            {
                "prompt": number,
                "positions": len(one),
                "top1": sum(same) / len(same),
                "kl_mean": sum(divergences) / len(divergences),
                "kl_max": max(divergences),
                "logprob_max_difference": max(differences),
                "perplexity": math.exp(-sum(x["logprob"] for x in one) / len(one)),
            }
        )
    positions = sum(row["positions"] for row in rows)
    return rows, {
        "prompts": len(rows),
        "positions": positions,
        "top1": round(sum(row["top1"] * row["positions"] for row in rows) / positions, 6),
        "kl_mean": sum(row["kl_mean"] * row["positions"] for row in rows) / positions,
        "kl_max": max(row["kl_max"] for row in rows),
        "equal": all(row["logprob_max_difference"] == 0 and row["kl_max"] == 0 and row["top1"] == 1 for row in rows),
    }


def serve_and_score(env: dict[str, str], model_dir: Path, prompts: list[list[int]], ready_s: float) -> list[list[Position]]:
    """One server's answers; it is gone afterwards."""
    with server.running("--model-dir", str(model_dir), env=env, ready_s=ready_s) as running:
        return score(f"unix:{running.state_dir}/worker.sock", prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", type=parse_env, default=parse_env("GLM53_MODE=exact"), help="settings of one side")
    parser.add_argument("--b", type=parse_env, default=parse_env("GLM53_MODE=fast"), help="settings of the other")
    parser.add_argument("--model-dir", type=Path, default=report.ROOT / "models" / "tiny" / "checkpoint")
    parser.add_argument("--ready-s", type=float, default=540.0, help="seconds that a server may take to be ready")
    parser.add_argument("--out", type=Path, default=report.ROOT / "docs" / "results" / "score_panel.json")
    args = parser.parse_args()
    started = report.start("bench.score_panel")
    tokenizer = tokenizers.Tokenizer.from_file(str(args.model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    a = serve_and_score(args.a, args.model_dir, prompts, args.ready_s)
    b = serve_and_score(args.b, args.model_dir, prompts, args.ready_s)
    rows, summary = compare(a, b)
    report.write_result(args.out, {**started, "a": args.a, "b": args.b, "model": args.model_dir.name}, rows, summary)


if __name__ == "__main__":
    main()
