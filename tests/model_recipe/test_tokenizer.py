import json

import pytest

from models.tiny.recipe.config import EOS_IDS, SPECIAL_IDS, SPECIAL_TOKENS, TEXT_TAGS, VOCAB_SIZE
from models.tiny.recipe.draw import Draw
from models.tiny.recipe.render import CHECKPOINT, encode, tokenizer
from models.tiny.recipe.words import CJK_CHARS, EMOJI

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\r\nnewlines\n\n\n",
    "你好，世界！こんにちは 안녕하세요",
    "👋🏽 family: 👨‍👩‍👧‍👦 flag: 🇩🇪 ❤️",
    "Ünïcödé Straße Ω Ж ا ก",
    '{"a": [1, 2.5, true], "b": {"c": "d"}}',
    "camelCase snake_case kebab-case UPPER 1234567890",
    "".join(EMOJI),
    CJK_CHARS,
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(text):
    """Any text survives encoding and decoding byte for byte."""
    assert tokenizer().decode(encode(text), skip_special_tokens=False) == text


def test_random_text_round_trips():
    """Random words, CJK strings of the wide range and emoji survive encoding and decoding."""
    draw = Draw("round-trip")
    for _ in range(200):
        text = f"{draw.salad()} {draw.cjk()}{draw.emoji()} {draw.nonsense()}-{draw.integer()}"
        assert tokenizer().decode(encode(text)) == text


def test_special_tokens_take_the_last_ids():
    """GLM's 36 special tokens stand at the end of the vocabulary in GLM's order."""
    assert len(SPECIAL_TOKENS) == 36
    for i, token in enumerate(SPECIAL_TOKENS):
        assert encode(token) == [VOCAB_SIZE - 36 + i]
    assert tokenizer().get_vocab_size() == VOCAB_SIZE


def test_tags_survive_decoding_without_special_tokens():
    """Think, tool and argument tags are kept where special tokens are skipped, as with GLM."""
    text = "<think>x</think><tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
    assert tokenizer().decode(encode(text + "<|user|>"), skip_special_tokens=True) == text
    assert len(TEXT_TAGS) == 10


def test_words_do_not_depend_on_their_surroundings():
    """A word has the same tokens after a space, in quotes, in JSON and between tags."""
    word = encode("qzkfu")
    for text in ("a qzkfu b", '"qzkfu"', '{"x": "qzkfu"}', "<arg_value>qzkfu</arg_value>", "x,qzkfu."):
        ids = encode(text)
        assert any(ids[i : i + len(word)] == word for i in range(len(ids)))


def test_digits_are_single_tokens():
    """Every digit is a token of its own."""
    assert len(encode("1234567890")) == 10


def test_checkpoint_names_the_same_ends():
    """config.json, generation_config.json and tokenizer_config.json agree with the tokenizer's special ids."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    added = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert config["text_config"]["eos_token_id"] == generation["eos_token_id"] == EOS_IDS
    assert {int(i): t["content"] for i, t in added.items()} == {i: t for t, i in SPECIAL_IDS.items()}
    assert {t["content"] for t in added.values() if not t["special"]} == set(TEXT_TAGS)
