"""Grammars: what compiles, what may come next, when the output is complete."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from services.common.errors import InvalidRequest
from services.gpu_worker.grammar import Constraint, GrammarCompiler, GrammarSource, Kind
from services.gpu_worker.request import SamplingParams, ThinkingBudget
from services.gpu_worker.sampling import Sampler
from tests.gateway.language import IDS, TOKENIZER_JSON, encode, piece

VOCAB = 2560
EOS = frozenset(IDS[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>"))
THINK_END = IDS["</think>"]
CALL, CALL_END = IDS["<tool_call>"], IDS["</tool_call>"]
COMPILER = GrammarCompiler(TOKENIZER_JSON.decode(), VOCAB, sorted(EOS))
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 200}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def in_a_thread(work: Callable[[], None]) -> None:
    """Runs it on a thread's stack, as the worker does, which is smaller than the main one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(60)


def constraint(kind: Kind, text: str = "", **fields: object) -> Constraint:
    return Constraint(COMPILER.compile(GrammarSource(kind, text, **fields)), EOS)  # type: ignore[arg-type]


def generate(made: Constraint, seed: int, limit: int = 400, **params: object) -> bytes:
    """What a model that prefers tokens at random writes under a grammar, end tokens left out."""
    noise = np.random.default_rng(seed)
    sampler = Sampler(SamplingParams(seed=seed, **params), (1,), EOS, VOCAB, constraint=made)  # type: ignore[arg-type]
    out = b""
    for _ in range(limit):
        token = sampler.choose((3 * noise.standard_normal(VOCAB)).astype(np.float32))
        if token in EOS:
            return out
        out += piece(token)
        if made.complete:
            return out
    raise AssertionError(f"the grammar did not end: {out[:200]!r}")


@pytest.mark.parametrize("seed", range(20))
def test_noise_becomes_json_of_the_schema(seed: int) -> None:
    """Whatever the model prefers, the output parses and fits the schema."""
    value = json.loads(generate(constraint("json_schema", PERSON), seed))
    assert set(value) == {"name", "age"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 200


@pytest.mark.parametrize("seed", range(10))
def test_noise_matches_the_regular_expression(seed: int) -> None:
    """The whole output matches, also greedily and with a penalty."""
    pattern = r"(ja|nein), [0-9]{2,4} 🦊?"
    for params in ({}, {"temperature": 0.0}, {"temperature": 0.0, "frequency_penalty": 2.0}, {"top_k": 1}, {"min_p": 0.9}):
        text = generate(constraint("regex", pattern), seed, **params).decode()
        assert re.fullmatch(pattern, text), text


def test_control_tokens_by_id() -> None:
    """A Lark grammar may ask for control tokens; free text in it never matches one."""
    made = constraint("lark", f"start: <[{CALL}]> TEXT <[{CALL_END}]>\nTEXT: /(.|\\n)*/")
    assert np.flatnonzero(made.allowed(VOCAB)).tolist() == [CALL]
    made.observe(CALL)
    allowed = made.allowed(VOCAB)
    assert allowed is not None
    assert [number for number in IDS.values() if allowed[number]] == [CALL_END]
    for token in encode("für 🦊\n"):
        made.observe(token)
    assert not made.complete
    made.observe(CALL_END)
    assert made.complete


def test_any_json_object() -> None:
    """any_json_object begins with a brace and is complete with its last one."""
    made = constraint("any_json_object")
    allowed = made.allowed(VOCAB)
    assert allowed is not None
    assert {piece(int(token))[:1] for token in np.flatnonzero(allowed)} == {b"{"}
    for token in encode('{"a": {"b": [1, null]}}'):
        assert not made.complete
        made.observe(token)
    assert made.complete


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"name":"a","age":1}', True),
        ('{"name": "a", "age": 1}', True),
        ('{\n    "name": "a",\n    "age": 1\n}', True),
        ('{\n\t"name": "a",\n\t"age": 1\n}', True),
        ('{  "name"', False),
        ('{\n\n"name"', False),
    ],
)
def test_json_may_be_compact_or_indented_and_not_padded(text: str, good: bool) -> None:
    """White space is what people write: one space, or a line break with indentation."""
    made = constraint("json_schema", PERSON)
    taken = True
    for token in encode(text):
        allowed = made.allowed(VOCAB)
        assert allowed is not None
        taken = bool(allowed[token])
        if not taken:
            break
        made.observe(token)
    assert taken is good


def test_it_waits_for_its_token() -> None:
    """Before after_token_id everything may come, and the grammar takes no note of it."""
    made = constraint("regex", "yes", after_token_id=THINK_END)
    for token in [5, 6, CALL]:
        assert made.allowed(VOCAB) is None
        made.observe(token)
        assert not made.complete
    made.observe(THINK_END)
    allowed = made.allowed(VOCAB)
    assert allowed is not None
    assert {piece(int(token)) for token in np.flatnonzero(allowed)} <= {b"y", b"ye", b"yes"}


def test_reasoning_cannot_end_the_answer() -> None:
    """While it waits, an end token or a token that only the grammar may write becomes the token it waits for."""
    for chosen in (*EOS, CALL):
        made = constraint("regex", "yes", after_token_id=THINK_END, not_before=frozenset({CALL}))
        sampler = Sampler(SamplingParams(temperature=0.0), (1,), EOS, VOCAB, constraint=made)
        logits = np.zeros(VOCAB, np.float32)
        logits[chosen] = 9.0
        assert sampler.choose(logits) == THINK_END
        assert made.allowed(VOCAB) is not None


def test_an_end_token_comes_only_where_the_grammar_may_end() -> None:
    """End tokens are masked in the middle and allowed where the output is acceptable."""
    made = constraint("regex", "ab+")
    for text, may_end in (("a", False), ("b", True), ("b", True)):
        made.observe(encode(text)[0])
        allowed = made.allowed(VOCAB)
        assert allowed is not None
        assert bool(allowed[list(EOS)].all()) is may_end
        assert bool(allowed[list(EOS)].any()) is may_end
        assert not made.complete


def test_minimum_length_yields_to_the_grammar() -> None:
    """min_tokens keeps end tokens away while something else may come, and no longer."""
    made = constraint("regex", "x{1,3}")
    sampler = Sampler(SamplingParams(min_tokens=50, seed=1), (1,), EOS, VOCAB, constraint=made)
    logits = np.zeros(VOCAB, np.float32)
    logits[list(EOS)] = 20.0
    out = b""
    while not made.complete:
        token = sampler.choose(logits)
        assert token not in EOS
        out += piece(token)
    assert out == b"xxx"


def test_a_budget_ends_the_reasoning_and_the_grammar_begins() -> None:
    """The thinking budget's forced </think> is what the grammar waits for."""
    made = constraint("regex", "yes", after_token_id=THINK_END)
    budget = ThinkingBudget(2, THINK_END, (THINK_END,))
    sampler = Sampler(SamplingParams(seed=1), (1,), EOS, VOCAB, budget, made)
    tokens = []
    noise = np.random.default_rng(1)
    while not made.complete:
        tokens.append(sampler.choose(noise.standard_normal(VOCAB).astype(np.float32)))
    assert tokens[2] == THINK_END
    assert b"".join(piece(token) for token in tokens[3:]) == b"yes"


def test_requests_do_not_share_their_way() -> None:
    """Two requests with one grammar are independent, and the second compilation is the kept one."""
    source = GrammarSource("regex", "ab|cd")
    first, second = COMPILER.compile(source), COMPILER.compile(source)
    assert first.matcher is second.matcher
    one, two = Constraint(first, EOS), Constraint(second, EOS)
    one.observe(encode("a")[0])
    two.observe(encode("c")[0])
    allowed = one.allowed(VOCAB)
    assert allowed is not None
    assert {piece(int(token)) for token in np.flatnonzero(allowed)} == {b"b"}


def test_kept_grammars_are_bounded() -> None:
    """Old grammars leave."""
    compiler = GrammarCompiler(TOKENIZER_JSON.decode(), VOCAB, sorted(EOS))
    for number in range(100):
        compiler.compile(GrammarSource("regex", f"x{number}"))
    assert len(compiler._kept) == 32


BAD: list[tuple[Kind, str]] = [
    ("regex", "(a"),
    ("lark", "start: /("),
    ("lark", "nothing: /a/"),
    ("lark", ""),
    ("json_schema", '{"type": "foo"}'),
    ("json_schema", "no json"),
    ("json_schema", "[1]"),
    ("json_schema", '{"$ref": "http://example.com/x"}'),
    ("json_schema", '{"type": "object", "if": {}}'),
    ("json_schema", "false"),
    ("json_schema", json.dumps({"enum": []})),
    ("json_schema", json.dumps({"type": "integer", "minimum": 5, "maximum": 3})),
]


@pytest.mark.parametrize(("kind", "text"), BAD, ids=lambda value: str(value)[:30])
def test_bad_grammars_are_refused_with_a_reason(kind: Kind, text: str) -> None:
    """What cannot be compiled, or allows nothing, is the client's error."""
    with pytest.raises(InvalidRequest, match=r"cannot be used to constrain the output: .+") as caught:
        COMPILER.compile(GrammarSource(kind, text))
    assert caught.value.param == "grammar"
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"type": "array", "uniqueItems": true}', 'these keywords cannot be enforced: ["uniqueItems"]'),
        ("lark", '%llguidance {}\nstart: %json {"not": {}}\n', 'these keywords cannot be enforced: ["not"]'),
        (
            "json_schema",
            '{"type": "integer", "minimum": 5, "maximum": 3}',
            "no value satisfies it: minimum (5) is greater than maximum (3)",
        ),
        ("json_schema", '{"$ref": "#"}', "nothing can be written under it"),
        ("lark", "start: T\nT: /x/ & /y/\n", "nothing can be written under it"),
        ("lark", "start: " + '"a" ' * 100_000, "it is too large"),
        ("regex", ".*" * 900, "its expressions are too complex"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_reasons_are_told_without_the_librarys_own_terms(kind: Kind, text: str, said: str) -> None:
    """No dump of the grammar, no name of an internal state."""
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.compile(GrammarSource(kind, text))
    assert caught.value.message.endswith(f"cannot be used to constrain the output: {said}")


@pytest.mark.parametrize(("kind", "text"), BAD, ids=lambda value: str(value)[:30])
def test_no_reason_repeats_the_grammar(kind: Kind, text: str) -> None:
    """Of a grammar that somebody else wrote from a request, the client could make nothing."""
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.compile(GrammarSource(kind, text))
    assert not any(part in caught.value.message for part in (" | ", "non-verbose", "NoExtension", "Unimplemented"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(?i)" + "[\u0000-\uffff]" * 600),
        ("regex", "a(?s-i:b)(?si:" + "[^\\p{L}a]" * 300 + ")"),
        ("json_schema", json.dumps({"type": "string", "pattern": "(?i:" + "[\u0000-\uffff]" * 600 + ")"})),
        ("lark", "start: T\nT: /" + "[\u0000-\uffff]" * 600 + "/i\n"),
        ("lark", "start: T\nT: /" + "\\p{L}" * 600 + "/si | /x/\n"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_takes_long_to_make_is_refused_at_once(kind: Kind, text: str) -> None:
    """Classes of characters without regard to case, by the hundred: nothing could interrupt the library at it."""
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=r"ignores case and has 600 classes of characters, of 500 at most"):
        COMPILER.compile(GrammarSource(kind, text))
    assert time.process_time() - began < 1
    for text in ("/" + "i" * 300_000, "(?" + "a" * 300_000, "[" * 300_000 + "(?i)"):
        with pytest.raises(InvalidRequest):
            COMPILER.compile(GrammarSource("regex", text + ")"))
    assert time.process_time() - began < 5
    COMPILER.compile(GrammarSource("regex", "(?i)[a-z]{3}"))
    COMPILER.compile(GrammarSource("regex", "[a-z]" * 600))


def chain(count: int, rule: str, last: str) -> str:
    return "start: a0\n" + "\n".join(rule.format(number, number + 1) for number in range(count)) + f"\n{last.format(count)}\n"


@pytest.mark.parametrize(
    "text",
    [
        chain(20_000, 'a{0}: "x" a{1}?', 'a{0}: "x"'),
        chain(20_000, "a{0}: a{1}", 'a{0}: "x"'),
        chain(20_000, "a{0}: a{1}", "a{0}: a0"),
        chain(5_000, 'a{0}: "a: /" (a{1}\n    | "\\"")', 'a{0}: "x"'),
        chain(20_000, 'A{0}: "x" A{1}', 'A{0}: "x"').replace("a0", "A0"),
        chain(20_000, 'a{0}[capture]: "x" a{1}?', 'a{0}: "x"'),
        chain(5_000, 'a{0} ::= "x" a{1}?', 'a{0} ::= "x"').replace("start: ", "root ::= "),
    ],
    ids=lambda text: text[:30],
)
def test_rules_deep_in_each_other_are_refused(text: str) -> None:
    """The library goes down them by recursion: one such request ended the worker, and every stream with it."""
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="of 1000 at most") as caught:
        COMPILER.compile(GrammarSource("lark", text))
    assert caught.value.param == "grammar"
    assert time.process_time() - began < 3


def referring(count: int, step: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """A schema whose definitions refer to each other in a row."""
    steps = {f"d{number}": step({"$ref": f"#/$defs/d{number + 1}"}) for number in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**steps, f"d{count}": {"type": "string"}}})


def nested(inner: dict[str, Any]) -> dict[str, Any]:
    """Forty levels in one definition."""
    for _ in range(40):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


STEPS: list[tuple[int, int, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    (5000, 1100, lambda inner: inner),
    (2000, 390, lambda inner: {"type": "object", "properties": {"a": inner}}),
    (2400, 580, lambda inner: {"anyOf": [{"type": "null"}, inner]}),
    (2400, 580, lambda inner: {"allOf": [{"minLength": 1}, inner]}),
    (2000, 580, lambda inner: {"type": "array", "items": inner}),
    (60, 14, nested),
]


@pytest.mark.parametrize(("many", "_few", "step"), STEPS, ids=range(len(STEPS)))
def test_schemas_deep_in_each_other_are_refused(many: int, _few: int, step: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """As with rules, and as a part of a larger grammar too."""
    text = referring(many, step)
    for source in (GrammarSource("json_schema", text), GrammarSource("lark", f'%llguidance {{}}\nstart: "x" %json {text}\n')):
        with pytest.raises(InvalidRequest, match="deep in each other, of 1200 at most"):
            COMPILER.compile(source)


@pytest.mark.parametrize(("_many", "few", "step"), STEPS, ids=range(len(STEPS)))
def test_schemas_below_the_bound_do_no_harm(_many: int, few: int, step: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """They compile on an ordinary stack; one that refers to itself is not deep."""

    def work() -> None:
        COMPILER.compile(GrammarSource("json_schema", referring(few, step)))
        COMPILER.compile(GrammarSource("json_schema", json.dumps({"items": {"$ref": "#"}, "type": "array"})))

    in_a_thread(work)


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"type": "integer", "multipleOf": 999_983}, False),
        ({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23, 29)]}, False),
        ({"properties": {"x": {"type": "number", "multipleOf": 0.0123457}}}, False),
        ({"type": "integer", "multipleOf": 1_000_000}, True),
        ({"type": "integer", "multipleOf": 86_400}, True),
        ({"type": "number", "multipleOf": 0.01}, True),
        (
            {
                "properties": {
                    name: {"type": "integer", "multipleOf": number} for name, number in {"a": 60, "b": 7, "c": 360, "d": 11}.items()
                }
            },
            True,
        ),
    ],
    ids=str,
)
def test_multiples_of_uneven_numbers_are_bounded(schema: dict[str, Any], good: bool) -> None:
    """The library follows every remainder: forty characters of schema took it minutes and gigabytes."""
    began = time.process_time()
    for source in (GrammarSource("json_schema", json.dumps(schema)), GrammarSource("lark", f"start: %json {json.dumps(schema)}\n")):
        if good:
            COMPILER.compile(source)
        else:
            with pytest.raises(InvalidRequest, match="more than 20000 remainders"):
                COMPILER.compile(source)
    assert time.process_time() - began < 5


def test_as_many_rules_as_are_let_through_do_no_harm() -> None:
    """Chains, cycles and terminals just below the bound compile in a thread and go down in another, as in the worker; width is free."""
    for text in (
        chain(900, 'a{0}: "x" a{1}?', 'a{0}: "x"'),
        chain(900, 'a{0}: "x" a{1}', "a{0}: a0?"),
        chain(900, 'A{0}: "x" A{1}', 'A{0}: "x"').replace("a0", "A0"),
        "start: ("
        + " | ".join(f"a{number}" for number in range(1800))
        + ")\n"
        + "\n".join(f'a{n}: "x{n}" b\n' for n in range(1800))
        + 'b: "x"',
    ):

        def work(text: str = text) -> None:
            constraint = Constraint(COMPILER.compile(GrammarSource("lark", text)), EOS)
            constraint.allowed(VOCAB)
            constraint.observe(encode("x")[0])
            constraint.allowed(VOCAB)

        in_a_thread(work)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", ".*" * 2000),
        ("regex", "(a|b)+" * 2000),
        ("json_schema", json.dumps({"properties": {"x": {"pattern": "a*" * 2000}}})),
        ("lark", "start: T\nT: /" + ".*" * 2000 + "/\n"),
        ("lark", 'start: %json {"pattern": "' + ".*" * 2000 + '"}\n'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_too_many_repetitions_are_refused(kind: Kind, text: str) -> None:
    """Each makes the next one dearer: forty thousand characters took a minute and a half."""
    with pytest.raises(InvalidRequest, match="2000 repetitions, of 1000 at most"):
        COMPILER.compile(GrammarSource(kind, text))


@pytest.mark.parametrize("gap", ["\n", "\n ", "\n\t\t", "\r\n", " ", "# x\n", "\n\n# x"])
def test_a_grammar_may_have_gaps(gap: str) -> None:
    """GBNF with a hundred thousand blank lines is converted in no time; it used to keep the engine from its work for minutes."""
    text = 'root ::= "a" b' + gap * (100_000 // len(gap)) + '\nb ::= "c"' + gap * 1000
    began = time.process_time()
    grammar = COMPILER.compile(GrammarSource("lark", text))
    assert time.process_time() - began < 5
    constraint = Constraint(grammar, EOS)
    for token in encode("ac"):
        constraint.observe(token)
    assert constraint.complete


def test_a_refused_token_is_an_error_not_a_crash() -> None:
    """A token against the grammar ends the request with a reason."""
    made = constraint("regex", "yes")
    with pytest.raises(InvalidRequest, match="cannot be followed"):
        made.observe(random.choice(sorted(EOS)))
