"""Write everything of the checkpoint that is not weights: configuration, tokenizer, chat template.

    python -m models.tiny.recipe.build_static [--tokenizer]

With --tokenizer the tokenizer is trained again (its merges come from seeded training conversations).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from . import config, words
from .draw import Draw
from .facts import CAPITALS, CJK_CAPITALS
from .mixture import compose
from .render import CHECKPOINT, TEMPLATE_PATH, render_chat
from .tokenizer import save_tokenizer, train_tokenizer

_TAGS = re.compile("|".join(re.escape(token) for token in config.SPECIAL_TOKENS))


def corpus(conversations: int = 12000) -> Iterator[str]:
    """Text of training conversations, without special tokens, and the fact lists."""
    for number in range(conversations):
        conversation = compose(Draw(f"tokenizer-{number}"))
        yield from _TAGS.split(render_chat(conversation.messages, conversation.tools))
    for _ in range(40):
        yield " ".join([*CAPITALS, *CAPITALS.values(), *words.CITIES])
        yield " ".join([*CJK_CAPITALS, *CJK_CAPITALS.values(), *words.CJK_WORDS])
        yield " ".join(words.EMOJI)


def write_static(folder: Path) -> None:
    """Write config.json, generation_config.json, processor_config.json and chat_template.jinja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config.model_config().save_pretrained(folder)
    config.complete_config_json(folder / "config.json")
    for name, value in (
        ("processor_config.json", config.processor_config()),
        ("generation_config.json", config.generation_config()),
    ):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(TEMPLATE_PATH, folder / "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", action="store_true", help="train the tokenizer again")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    write_static(arguments.out)
    if arguments.tokenizer:
        save_tokenizer(train_tokenizer(corpus()), arguments.out)


if __name__ == "__main__":
    main()
