"""ChatOpenAI of langchain-openai: invoke, stream with usage, bound tools, structured output."""

from __future__ import annotations

from langchain_openai import ChatOpenAI

from tests.clients.python.server import FRANCE, MODEL, URL, WEATHER
from tests.e2e import asking


def main() -> None:
    """Raises AssertionError when an answer is not what the library should get."""
    chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, temperature=0, stream_usage=True, max_retries=0)  # type: ignore[arg-type]
    assert "Paris" in chat.invoke(FRANCE).content
    chunks = list(chat.stream(FRANCE))
    assert "Paris" in "".join(str(chunk.content) for chunk in chunks)
    assert sum((chunk.usage_metadata or {}).get("total_tokens", 0) for chunk in chunks) > 0
    called = chat.bind_tools([asking.WEATHER_TOOL]).invoke(WEATHER)
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("get_weather", {"city": "Paris"})]
    schema = {
        "title": "Answer",
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = chat.with_structured_output(schema, method="json_schema").invoke(FRANCE)
    assert isinstance(answer, dict)
    assert isinstance(answer["n"], int)
    print("langchain: all checks passed")


if __name__ == "__main__":
    main()
