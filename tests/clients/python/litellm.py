"""litellm's OpenAI provider: plain, streamed, tools."""

from __future__ import annotations

import json
import os

# Without this it asks the network for prices while it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pytest

from tests.clients.python.server import FRANCE, MODEL, URL, WEATHER
from tests.e2e import asking


def main() -> None:
    """Raises AssertionError when an answer is not what the library should get."""
    fields = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0}
    question = [{"role": "user", "content": FRANCE}]
    answer = litellm.completion(messages=question, **fields)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.reasoning_content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=question, stream=True, **fields))
    assert text == answer.choices[0].message.content
    called = litellm.completion(messages=[{"role": "user", "content": WEATHER}], tools=[asking.WEATHER_TOOL], **fields)
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}
    # What its context_window_fallbacks go by.
    with pytest.raises(litellm.ContextWindowExceededError, match="16384"):
        litellm.completion(messages=[{"role": "user", "content": "a " * 40_000}], **fields)
    print("litellm: all checks passed")


if __name__ == "__main__":
    main()
