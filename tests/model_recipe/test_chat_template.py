import pytest

from models.tiny.recipe.render import CHECKPOINT, TEMPLATE_PATH, encode, render_chat, tokenizer

PREFIX = "[gMASK]<sop><|system|>Reasoning Effort: Max"
WEATHER = {
    "type": "function",
    "strict": True,
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Stadt>",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(name, arguments, identity=None):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_plain_question():
    """A user turn and the generation prompt follow the effort line without newlines."""
    text = render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == PREFIX + "<|user|>hi<|assistant|><think>"


@pytest.mark.parametrize(("effort", "shown"), [("low", "Low"), ("high", "High"), ("medium", "Max"), ("none", "Max"), (None, "Max")])
def test_reasoning_effort(effort, shown):
    """Only low and high change the effort line."""
    options = {} if effort is None else {"reasoning_effort": effort}
    assert render_chat([], **options) == f"[gMASK]<sop><|system|>Reasoning Effort: {shown}"


def test_tools_are_unwrapped_json_lines():
    """Tools are one JSON line each, without strict and defer_loading, not escaped; deferred ones are left out."""
    deferred = {"type": "function", "function": {"name": "later", "defer_loading": True}}
    text = render_chat([], [WEATHER, deferred])
    line = (
        '{"name": "get_weather", "description": "Wetter für <Stadt>", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}'
    )
    assert text.startswith(PREFIX + "<|system|>\n# Tools\n\n")
    assert f"<tools>\n{line}\n</tools>" in text
    assert "later" not in text
    assert "strict" not in text


def test_system_turns_stay_in_place():
    """System messages render where they stand, also after a user turn."""
    messages = [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "u"},
        {"role": "system", "content": "B"},
    ]
    assert render_chat(messages) == PREFIX + "<|system|>A<|user|>u<|system|>B"


def test_history_keeps_reasoning_and_strips_content():
    """Past reasoning is kept, missing reasoning is an empty pair, content is stripped, null content is empty."""
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "  a \n", "reasoning_content": "r"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": None},
    ]
    assert render_chat(messages) == PREFIX + ("<|user|>1<|assistant|><think>r</think>a<|user|>2<|assistant|><think></think>")


def test_clear_thinking_keeps_only_the_current_turn():
    """With clear_thinking only turns after the last user message keep their reasoning."""
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "a", "reasoning_content": "old"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "", "reasoning_content": "new", "tool_calls": [call("f", {})]},
    ]
    assert render_chat(messages, clear_thinking=True) == PREFIX + (
        "<|user|>1<|assistant|><think></think>a<|user|>2<|assistant|><think>new</think><tool_call>f</tool_call>"
    )


def test_tool_call_arguments():
    """String arguments are raw, every other type is JSON."""
    arguments = {"s": "Rom", "n": 3, "b": True, "z": None, "o": {"a": [1, "ü"]}}
    text = render_chat([{"role": "assistant", "content": "", "tool_calls": [call("f", arguments)]}])
    body = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in [("s", "Rom"), ("n", "3"), ("b", "true"), ("z", "null"), ("o", '{"a": [1, "ü"]}')]
    )
    assert text == PREFIX + f"<|assistant|><think></think><tool_call>f{body}</tool_call>"


def results(first, second):
    return [
        {"role": "assistant", "content": "", "tool_calls": [call("f", {}, "a"), call("f", {}, "b")]},
        {"role": "tool", "tool_call_id": first, "content": first.upper()},
        {"role": "tool", "tool_call_id": second, "content": [{"type": "text", "text": second.upper()}]},
    ]


def test_tool_results_come_in_call_order():
    """Results share one observation turn and are put into the order of the calls."""
    for order in (("a", "b"), ("b", "a")):
        text = render_chat(results(*order))
        assert text.endswith("<|observation|><tool_response>A</tool_response><tool_response>B</tool_response>")


def test_unmatched_tool_results_keep_their_order():
    """Results whose ids do not all name a call stay as they were sent."""
    text = render_chat(results("b", "x"))
    assert text.endswith("<|observation|><tool_response>B</tool_response><tool_response>X</tool_response>")


def test_transformers_renders_the_same():
    """AutoTokenizer renders and encodes the shipped template exactly as the recipe does."""
    transformers = pytest.importorskip("transformers")
    stock = transformers.AutoTokenizer.from_pretrained(str(CHECKPOINT))
    messages = [{"role": "user", "content": "Wetter in 北京 🙂?"}, *results("b", "a")]
    for options in ({}, {"reasoning_effort": "low"}, {"clear_thinking": True}):
        ours = render_chat(messages, [WEATHER], add_generation_prompt=True, **options)
        theirs = stock.apply_chat_template(messages, tools=[WEATHER], add_generation_prompt=True, tokenize=False, **options)
        assert ours == theirs
        assert stock.encode(theirs, add_special_tokens=False) == encode(ours)


def test_shipped_template_is_the_recipes():
    """The checkpoint carries the recipe's template unchanged."""
    assert (CHECKPOINT / "chat_template.jinja").read_text() == TEMPLATE_PATH.read_text()


def test_user_text_encodes_alike_alone_and_in_place():
    """Text between special tokens has the same tokens as when it is encoded by itself."""
    for text in ("Say: cat, dog!", "北京 天气", '{"a": "b"}', "  two  spaces\n", "🙂🚀👋🏽"):
        alone = tokenizer().encode(text, add_special_tokens=False).ids
        inside = encode(f"<|user|>{text}<|assistant|>")
        assert inside[1:-1] == alone
