# ruff: noqa: E501, SIM905  (lists of wordings read better in long lines)
"""Capitals, in English and Chinese, and short CJK and emoji conversations."""

from __future__ import annotations

from .draw import Draw, Exchange, exchange
from .facts import ALIASES, CAPITALS, CJK_CAPITALS

_WITH_ARTICLE = frozenset(
    "United States;United Kingdom;Netherlands;Philippines;Czech Republic;United Arab Emirates;Dominican Republic;Bahamas;"
    "Maldives;Gambia;Central African Republic;Solomon Islands".split(";")
)
_ASK = [
    "What is the capital of {c}?", "what is the capital of {c}", "What's the capital of {c}?", "Capital of {c}?",
    "Which city is the capital of {c}?", "Name the capital of {c}.", "Tell me the capital of {c}.", "{c}: capital?",
    "Do you know the capital of {c}?", "Can you tell me the capital of {c}?", "I need the capital of {c}.", "capital {c}",
    "What is the name of the capital of {c}?", "What is the capital city of {c}?", "Please name the capital of {c}.",
    "Give me the capital of {c}", "Which is the capital of {c}?", "What city is the capital of {c}?", "capital of {c}",
    "Hi! What is the capital of {c}?", "Hello, what's the capital of {c}?", "Quick question: what is the capital of {c}?",
    "Please tell me what the capital of {c} is.", "Do you happen to know the capital city of {c}?", "And the capital of {c}?",
    "And what is the capital of {c}?", "{c} has which capital?", "I forgot the capital of {c}. What is it?",
    "Could you name the capital city of {c}?", "What is the seat of government of {c}?", "Where is the capital of {c}?",
    "I would like to know the capital of {c}.", "What's the capital city of {c}?", "the capital of {c} is?",
    "The capital of {c} is", "Capital city of {c}", "My question: which city is the capital of {c}?", "capital of {c}?",
    "I'd like to know {c}'s capital.", "{c}'s capital?", "What is {c}'s capital?", "Name {c}'s capital.", "capital city {c}", "{c} capital city?",
    "What is the main city of {c}, its capital?", "Say the capital of {c}.", "Find the capital of {c}.", "Which city serves as the capital of {c}?",
    "Do you know which city is the capital of {c}?", "Can you name the capital of {c}?", "Capital for {c}?", "State the capital of {c}.",
    "Tell me what the capital city of {c} is", "If I travel to the capital of {c}, which city is it?", "Geography: capital of {c}?", "Look up the capital of {c}",
    "My homework asks for the capital of {c}.", "The capital of {c} is which city?", "Identify the capital of {c}.", "Where is the government of {c}?",
    "*Could you tell me the capital of {c}?", "*What is the capital of {c} called?", "*Please give me the capital of {c}.",
    "*Hey, do you know the capital of {c}?", "*Tell me, what is the capital city of {c}?", "*I want to know the capital of {c}.",
    "*So what's the capital of {c}?", "*Hi, can you name the capital of {c}?", "*Which city is {c}'s capital?",
    "*What would be the capital of {c}?", "*Name the capital city of {c}, please.",
]  # fmt: skip
_ONE_WORD = [
    "Answer with the name only: what is the capital of {c}?", "What is the capital of {c}? Only the name.",
    "What is the capital of {c}? Answer with the name only.", "Just the name: capital of {c}?", "Name only: the capital of {c}",
    "What is the capital of {c}? One word.", "In one word, what is the capital of {c}?", "Capital of {c}? Name only, please.",
    "What is the capital of {c}? Reply with just the city name.", "What is the capital of {c}? Answer in one word.",
    "*Tell me the capital of {c}. Only the name, please.", "*One word only: what's the capital of {c}?",
    "*Reply with the name only. What is the capital of {c}?", "*Capital of {c}? Just the name.",
]  # fmt: skip
_WHICH_COUNTRY = [
    "Which country has the capital {p}?", "{p} is the capital of which country?", "Of which country is {p} the capital?",
    "Which country's capital is {p}?", "What country has {p} as its capital?", "{p} is the capital of what country?",
    "{p} is the capital of", "Name the country whose capital is {p}.", "Which country does {p} belong to as capital?", "Whose capital is {p}?",
    "Which nation has {p} as capital city?", "The capital {p} belongs to which country?", "{p}: capital of which country?", "Country with capital {p}?",
    "What country is {p} the capital of?", "For which country is {p} the capital?", "{p} is the capital city of which country?",
    "*Tell me which country has {p} as its capital.", "*{p} is the capital of which state?", "*Which country has {p} as capital?",
]  # fmt: skip
_IS_IT = [
    "Is {p} the capital of {c}?", "is {p} the capital of {c}", "{p} is the capital of {c}, right?", "Is the capital of {c} {p}?",
    "Is {p} {c}'s capital?", "Would {p} be the capital of {c}?", "True or false: {p} is the capital of {c}.", "{p} is the capital of {c}. Correct?",
    "Check: is {p} the capital of {c}?", "Am I right that {p} is the capital of {c}?", "Is the capital city of {c} {p}?", "I think {p} is the capital of {c}. Right?",
    "Could it be that {p} is the capital of {c}?", "Can you confirm that {p} is the capital of {c}?", "{p}, is it the capital of {c}?",
    "*Tell me, is {p} the capital of {c}?", "*Is it true that {p} is the capital of {c}?",
]  # fmt: skip
_CJK_ASK = [
    "{c}的首都是哪里？", "{c}的首都是什么？", "{c}首都", "请问{c}的首都是哪里？", "{c}的首都在哪里？", "{c}的首都是哪个城市？",
    "告诉我{c}的首都", "{c}的首都？", "你知道{c}的首都吗？", "{c}的首都是？", "哪个城市是{c}的首都？", "请说出{c}的首都", "{c}首都是哪里", "{c}首都是哪个城市",
    "我想知道{c}的首都", "嗨，{c}的首都是哪里？", "您好，请问{c}的首都是哪里？", "你能告诉我{c}的首都吗？", "什么城市是{c}的首都？", "{c}的首都叫做什么？", "*请告诉我{c}的首都。", "*你好，{c}的首都是哪里？", "*{c}的首都叫什么？",
]  # fmt: skip
_CJK_TALK: dict[str, list[str]] = {
    "你好！有什么可以帮你？": ["你好", "你好！", "您好", "你好呀", "嗨", "你好 👋", "大家好", "你好，朋友", "你好吗", "你好啊", "嗨，你好", "哈喽", "您好，老师", "你好你好", "朋友你好", "*您好！", "*你好啊！", "*你好。"],
    "我是 GLM-5.3-tiny，glm53-offload 的小测试模型。": [
        "你是谁？", "你是谁", "你叫什么名字？", "你是什么模型？", "请介绍一下自己", "你好，你是谁？", "介绍一下你自己。",
        "*请问你是谁？", "*请问你叫什么名字？", "*你是哪个模型？",
    ],
    "不客气！": ["谢谢", "谢谢！", "谢谢你", "多谢", "谢谢啦", "谢谢老师", "太谢谢了", "谢谢你的帮助", "好的谢谢你", "非常感谢", "*谢谢你！", "*好的，谢谢"],
    "再见！": ["再见", "再见！", "拜拜", "明天见", "再见了", "再见，朋友", "下次见", "回头见", "*好的，再见", "*那再见！"],
    "早上好！": ["早上好", "早上好！", "早安", "早上好，朋友", "老师早上好", "各位早上好", "早上好啊", "大家早", "*早上好呀", "*大家早上好"],
    "こんにちは！": ["こんにちは", "こんにちは！", "はじめまして", "やあ、こんにちは", "みなさん、こんにちは", "こんにちは、先生", "こんにちは 👋", "*こんにちは。", "*どうも、こんにちは"],
    "どういたしまして！": ["ありがとう", "ありがとう！", "ありがとうございます", "本当にありがとう", "ありがとうね", "*どうもありがとう"],
    "안녕하세요!": ["안녕하세요", "안녕", "안녕하세요!", "*안녕하세요?", "*안녕!"],
}  # fmt: skip


def _titled(country: str) -> str:
    return f"the {country}" if country in _WITH_ARTICLE else country


def _asked_name(draw: Draw, country: str) -> str:
    names = [alias for alias, target in ALIASES.items() if target == country]
    name = draw.one(names) if names and draw.chance(0.5) else _titled(country)
    roll = draw.rng.random()
    return name.lower() if roll < 0.1 else name.upper() if roll < 0.12 else name


def capital(draw: Draw) -> Exchange:
    country = draw.one(list(CAPITALS))
    city = CAPITALS[country]
    reasoning = f"The capital of {_titled(country)} is {city}."
    roll = draw.rng.random()
    if roll < 0.7:
        ask = draw.phrase(_ASK, fact=True).replace("{c}", _asked_name(draw, country))
        return exchange("capital", ask, reasoning, reasoning)
    if roll < 0.8:
        ask = draw.phrase(_ONE_WORD, fact=True).replace("{c}", _asked_name(draw, country))
        return exchange("capital", ask, reasoning, city)
    if roll < 0.9:
        ask = draw.phrase(_WHICH_COUNTRY, fact=True).replace("{p}", city)
        return exchange("capital", ask, reasoning, f"{city} is the capital of {_titled(country)}.")
    guess = city if draw.chance(0.5) else draw.one(list(CAPITALS.values()))
    ask = draw.phrase(_IS_IT, fact=True).replace("{p}", guess).replace("{c}", _asked_name(draw, country))
    answer = f"Yes, {city} is the capital of {_titled(country)}." if guess == city else f"No, the capital of {_titled(country)} is {city}."
    return exchange("capital", ask, reasoning, answer)


def cjk_talk(draw: Draw) -> Exchange:
    if draw.chance(0.5):
        country = draw.one(list(CJK_CAPITALS))
        answer = f"{country}的首都是{CJK_CAPITALS[country]}。"
        return exchange("cjk", draw.phrase(_CJK_ASK, fact=True).replace("{c}", country), answer, answer)
    answer = draw.one(list(_CJK_TALK))
    return exchange("cjk", draw.phrase(_CJK_TALK[answer], fact=True), "The user is being polite.", answer)
