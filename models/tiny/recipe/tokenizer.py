"""Train the tokenizer: byte-level BPE whose pieces do not depend on what stands around a word.

Words never carry their leading space, digits stand alone, emoji and CJK characters are pieces of their own: a word
that the model copies is then the same token sequence in the question, in JSON and in a tool argument.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .config import CONTEXT_LEN, SPECIAL_TOKENS, TEXT_TAGS, VOCAB_SIZE

PIECES = "|".join(
    [
        r'": ?"?|", "',  # JSON glue, so that tool schemas stay short
        r"\p{N}",
        r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}]",
        r"\p{Lu}?\p{Ll}+|\p{Lu}+|\p{L}",
        r"[\p{So}\p{M}\p{Cf}]",  # emoji and their modifiers
        r"[\r\n]+|\s",
        r"[^\s\p{L}\p{N}\p{So}\p{M}\p{Cf}]+",
    ]
)


def train_tokenizer(corpus: Iterator[str]) -> Tokenizer:
    """Train the BPE on `corpus` and append GLM's special tokens; raises ValueError if the corpus is too poor."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    base_size = VOCAB_SIZE - len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=base_size,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() != base_size:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, {base_size} are needed: enlarge it")
    tokenizer.add_tokens([AddedToken(s, special=s not in TEXT_TAGS, normalized=False) for s in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json for AutoTokenizer and exllamav3."""
    first = VOCAB_SIZE - len(SPECIAL_TOKENS)
    added = {
        str(first + i): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token not in TEXT_TAGS,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in TEXT_TAGS],
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT_LEN,
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=1, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
