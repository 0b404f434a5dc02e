"""The first request of a new user, with nothing but the standard library: `python -m bench.first_request URL`."""

from __future__ import annotations

import json
import sys
import urllib.request


def main(url: str) -> int:
    """Asks one question and checks that an answer in OpenAI's shape comes back."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    choice = answer["choices"][0]
    print(json.dumps(choice, ensure_ascii=False))
    return 0 if choice["finish_reason"] == "stop" and choice["message"]["content"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
