"""Writes expectations.json from a running server: `python -m tests.e2e.make_expectations URL`.

Run it only when the shipped model or its template has changed on purpose, and read the answers before committing them: the tests hold every
later version to exactly these.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.e2e.asking import EXPECTATIONS, WEATHER_TOOL, ask, model_of
from tests.e2e.test_stack import plain

TIME_TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the current time in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City name"}}, "required": ["city"]},
    },
}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CASES: dict[str, dict[str, Any]] = {
    "hello": {"messages": user("Hello!")},
    "who_are_you": {"messages": user("Who are you?")},
    "capital": {"messages": user("What is the capital of France?")},
    "capital_without_thinking": {"messages": user("What is the capital of Peru?"), "chat_template_kwargs": {"enable_thinking": False}},
    "sum": {"messages": user("What is 17 + 25?")},
    "difference_without_thinking": {"messages": user("What is 81 - 46?"), "chat_template_kwargs": {"enable_thinking": False}},
    "system": {"messages": [{"role": "system", "content": "You are a helpful assistant."}, *user("What is the capital of Japan?")]},
    "memory": {
        "messages": [
            *user("My name is Lena."),
            {"role": "assistant", "content": "Nice to meet you, Lena!"},
            *user("What is my name?"),
        ]
    },
    "tool_call": {"messages": user("What is the weather in Paris?"), "tools": [WEATHER_TOOL, TIME_TOOL]},
    "other_tool": {"messages": user("What time is it in Oslo?"), "tools": [WEATHER_TOOL, TIME_TOOL]},
    "two_calls": {"messages": user("What is the weather in Paris and in Rome?"), "tools": [WEATHER_TOOL]},
    "stop_string": {
        "messages": user("What is the capital of Italy?"),
        "stop": ["Rome"],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "cut_by_max_tokens": {"messages": user("Who are you?"), "max_tokens": 7},
}


def main(url: str) -> None:
    """Asks every case greedily and writes what came back."""
    model = model_of(url)
    rows = []
    for name, case in CASES.items():
        body = {**case, "temperature": 0}
        choice = ask(url, {**body, "model": model})["choices"][0]
        rows.append({"name": name, "body": body, "message": plain(choice["message"]), "finish_reason": choice["finish_reason"]})
        sys.stdout.write(f"{name}: {json.dumps(rows[-1]['message'], ensure_ascii=False)} {choice['finish_reason']}\n")
    EXPECTATIONS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
