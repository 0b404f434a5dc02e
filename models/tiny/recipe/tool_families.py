# ruff: noqa: E501, SIM905  (lists of wordings read better in long lines)
"""Everyday tools with natural requests: what client examples usually declare (weather, mail, alarms, ...)."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .draw import Draw
from .facts import CAPITALS
from .tool_specs import Param, Spec, tool_name

Slot = tuple[list[str], str]
"""Possible parameter names and the JSON type."""


@dataclass
class Family:
    """Verbs and nouns for names, slots by key, and request templates that mention slots as {key}."""

    verbs: list[str]
    nouns: list[str]
    slots: dict[str, Slot]
    asks: list[str]
    descriptions: list[str]
    pair_asks: list[str] = field(default_factory=list)
    """Requests for two calls that differ in the first slot: {x} and {y}."""


_WEATHER = ["What is the weather in {a}?", "How is the weather in {a}?", "weather in {a}", "Weather in {a}?", "What's the weather like in {a}?",
            "Tell me the weather in {a}.", "Is it raining in {a}?", "How warm is it in {a}?", "What is the temperature in {a}?", "Is it cold in {a}?",
            "I need the weather for {a}", "Check the weather in {a}, please.", "What's the weather in {a} today?", "Will it rain in {a}?",
            "what is the weather in {a}", "Do I need an umbrella in {a}?", "How's the weather in {a} right now?", "Get the weather for {a}.",
            "Show me the weather in {a}.", "{a} weather", "Give me the weather for {a}.", "How is it outside in {a}?", "Is it sunny in {a}?", "Is it hot in {a}?", "Is it snowing in {a}?", "Forecast for {a}?", "What will the weather be in {a}?", "Look up the weather in {a}", "Weather report for {a}.", "I am going to {a}, what is the weather?", "I live in {a}. How is the weather?", "Should I take a coat in {a}?", "Find out the weather in {a}.", "Can you check the weather in {a}?", "*Please tell me the weather in {a}.", "*What is the weather like in {a} now?", "*Could you check the weather for {a}?"]  # fmt: skip
_BOTH = ["What is the weather in {x} and {y}?", "Weather in {x} and {y}", "Compare the weather in {x} and {y}.", "Tell me the weather in {x} and in {y}.",
         "How is the weather in {x} and {y}?", "What's the weather like in {x} and in {y}?", "I need the weather for {x} and {y}.",
         "what is the weather in {x} and {y}", "Weather: {x}, {y}", "How is the weather in {x}? And in {y}?", "Is it colder in {x} than in {y}?", "Which is warmer, {x} or {y}?", "Is {x} colder than {y}?", "Is it raining in {x} or in {y}?", "Check the weather for both {x} and {y}.", "Get me the weather of {x} and {y}", "{x} and {y}: weather?", "Is it hot in {x} and {y}?", "What is the temperature in {x} and in {y}?", "First the weather in {x}, then in {y}.", "Where is it sunny, {x} or {y}?", "weather for {x} & {y}", "Show the weather in {x} as well as in {y}.", "*Please get the weather for {x} and {y}.", "*Is it warmer in {x} or {y}?"]  # fmt: skip

FAMILIES: dict[str, Family] = {
    "weather": Family(
        ["get", "fetch", "check", "lookup", "current", "show", "read", "ask", "find", "query", "local", "city", "tell", "live"],
        ["weather", "weather", "weather", "forecast", "current weather", "temperature", "weather report", "weather info", "weather data", "conditions"],
        {"a": (["city", "location", "place", "town", "city_name", "q"], "string")}, _WEATHER,
        ["Get the weather for a city", "Get the current weather in a given location", "Current weather", "Returns the weather of a place", "Weather lookup by city name"],
        _BOTH),
    "weather_unit": Family(
        ["get", "fetch", "check", "lookup", "current", "show", "read", "find", "query", "local", "tell"],
        ["weather", "forecast", "current weather", "temperature", "weather report", "weather info"],
        {"a": (["city", "location", "place", "town"], "string"), "u": (["unit", "units", "scale"], "unit")},
        ["What is the weather in {a} in {u}?", "Weather in {a} in {u}, please", "How warm is it in {a}? Use {u}.", "Temperature in {a} in {u}",
         "Get the weather for {a} in {u}.", "What's the temperature in {a} in degrees {u}?", "What is the weather in {a}?", "Weather in {a}?",
         "What's the weather like in {a} today?", "How warm is it in {a}?", "Tell me the weather in {a}.", "*Please tell me the weather in {a} in {u}."],
        ["Get the weather for a city", "Get the current weather in a given location", "Current weather with unit"]),
    "time": Family(
        ["get", "fetch", "current", "local", "show", "tell", "check", "find", "world"], ["time", "local time", "clock", "current time", "time zone"],
        {"a": (["city", "location", "place", "timezone", "zone"], "string")},
        ["What time is it in {a}?", "Tell me the time in {a}.", "time in {a}", "What is the local time in {a}?", "Current time in {a}?",
         "what time is it in {a}", "Which time is it in {a}?", "How late is it in {a}?", "Time in {a} please", "Give me the time in {a}.", "What is the time in {a}?", "Is it late in {a}?", "Check the clock in {a}.", "Show the time for {a}", "{a} time?", "*Please tell me what time it is in {a}."],
        ["Get the current time in a city", "Local time of a place", "Returns the time", "Current time lookup"],
        ["What time is it in {x} and {y}?", "What time is it in {x}? And in {y}?", "Time in {x} and {y}?", "Compare the time in {x} and {y}.", "Is it later in {x} than in {y}?", "Tell me the time in {x} and in {y}."]),
    "email": Family(
        ["send", "write", "compose", "deliver", "mail", "post", "new"], ["email", "mail", "e mail", "mail message"],
        {"t": (["to", "recipient", "address", "receiver"], "name"), "s": (["subject", "title", "topic"], "phrase"), "b": (["body", "text", "content", "message"], "phrase")},
        ['Send an email to {t} with subject "{s}" and body "{b}".', 'Email {t}, subject "{s}", body "{b}"', 'Write an email to {t} with the subject "{s}" and the text "{b}"',
         'Please send {t} an email. Subject: "{s}". Body: "{b}".', 'Send an email to {t} with subject {s} and body {b}', 'Email {t} with subject {s} and body {b}.', 'Mail {t} about "{s}": "{b}"', 'Write {t} an email with subject {s} and text {b}', 'Compose an email to {t}: subject "{s}", body "{b}".', 'Please email {t}: subject {s}, body {b}', '*Could you email {t} with subject "{s}" and text "{b}"?'],
        ["Send an email", "Sends a mail to someone", "Compose and send an email"]),
    "message": Family(
        ["send", "write", "post", "text", "deliver", "push", "new"], ["message", "text message", "sms", "chat message", "note", "dm"],
        {"t": (["to", "recipient", "user", "contact", "name"], "name"), "b": (["text", "message", "body", "content"], "phrase")},
        ['Send a message to {t}: "{b}"', 'Text {t} "{b}"', 'Tell {t} "{b}"', 'Message {t}: "{b}"', 'Send {t} the message "{b}".', 'Write "{b}" to {t}',
         'Please text {t}: "{b}"', 'Send a message to {t} saying {b}', 'Tell {t} {b}', 'Let {t} know: {b}', 'Send "{b}" to {t}.', 'Message to {t}: {b}', 'Write to {t}: "{b}"', 'Send {t} a text saying "{b}".', 'Please tell {t} that {b}', 'Can you text {t} "{b}"?', 'Say "{b}" to {t}', '*Could you send {t} the text "{b}"?'],
        ["Send a message to a contact", "Send a text message", "Message someone"]),
    "search": Family(
        ["search", "find", "lookup", "query", "browse", "google", "web"], ["web", "internet", "search", "online", "pages", "documents", "articles", "database"],
        {"q": (["query", "q", "text", "keywords", "term"], "phrase")},
        ['Search for "{q}"', 'Search the web for "{q}".', 'Find "{q}" online', 'Look up "{q}"', 'Please search for "{q}".', 'Search for {q}', 'Find {q}', 'Look up {q} online', 'Google {q}', 'Search the internet for {q}', 'Look for "{q}"', 'I am looking for "{q}".', 'Find information about {q}', 'What can you find about "{q}"?', 'Do a search for {q}', '*Can you search for "{q}"?'],
        ["Search the web", "Find documents", "Web search"]),
    "search_limit": Family(
        ["search", "find", "lookup", "query", "browse"], ["web", "products", "books", "documents", "articles", "recipes", "papers"],
        {"n": (["limit", "count", "max_results", "num_results", "top_k"], "integer"), "q": (["query", "q", "keywords", "term"], "phrase")},
        ['Find {n} results for "{q}"', 'Search for "{q}" with limit {n}', 'Give me {n} results about "{q}".', 'Show {n} results for {q}', 'Search {n} items about {q}', 'Get me {n} hits for "{q}"', 'List {n} results on "{q}"', 'Look up {n} entries for {q}', '*Please find {n} results for "{q}".'],
        ["Search with a limit on the number of results", "Find results", "Search the catalog"]),
    "alarm": Family(
        ["set", "create", "add", "new", "start", "make"], ["alarm", "wake up", "alarm clock", "reminder alarm"],
        {"t": (["time", "at", "clock", "alarm_time"], "clock")},
        ["Set an alarm for {t}.", "Wake me up at {t}", "Set the alarm to {t}", "alarm at {t}", "Please wake me at {t}.", "I need an alarm at {t}.", "Alarm for {t} please", "Get me up at {t}.", "Ring at {t}", "Create an alarm at {t}", "Can you wake me up at {t}?", "I have to get up at {t}.", "*Could you set an alarm for {t}?"],
        ["Set an alarm", "Creates an alarm at a time", "Alarm clock"], ["Set alarms for {x} and {y}.", "Wake me at {x} and at {y}"]),
    "timer": Family(
        ["set", "start", "create", "new", "run"], ["timer", "countdown", "kitchen timer", "stopwatch"],
        {"m": (["minutes", "duration", "mins", "duration_minutes", "length"], "integer")},
        ["Set a timer for {m} minutes.", "Start a {m} minute timer", "timer {m} minutes", "Please set a timer for {m} minutes", "{m} minutes timer", "Count down {m} minutes.", "Timer for {m} minutes please", "I need a timer of {m} minutes", "Set {m} minutes", "Remind me in {m} minutes.", "*Can you start a timer of {m} minutes?"],
        ["Set a timer in minutes", "Starts a countdown", "Kitchen timer"], ["Set timers for {x} and {y} minutes."]),
    "currency": Family(
        ["convert", "exchange", "change", "calc", "get"], ["currency", "money", "exchange rate", "amount", "rates"],
        {"n": (["amount", "value", "sum"], "number"), "f": (["from", "from_currency", "source", "base"], "currency"), "t": (["to", "to_currency", "target", "quote"], "currency")},
        ["Convert {n} {f} to {t}.", "How much is {n} {f} in {t}?", "{n} {f} in {t}", "Exchange {n} {f} to {t}", "Change {n} {f} into {t}", "What is {n} {f} in {t}?", "I have {n} {f} and want {t}.", "{n} {f} to {t}", "Give me {n} {f} as {t}", "*Please convert {n} {f} into {t}."],
        ["Convert an amount from one currency to another", "Currency conversion", "Exchange money"]),
    "math": Family(
        ["add", "sum", "plus", "calc", "compute"], ["numbers", "values", "sum", "two numbers", "integers"],
        {"a": (["a", "x", "first", "num1", "left"], "number"), "b": (["b", "y", "second", "num2", "right"], "number")},
        ["Add {a} and {b} with the tool.", "Use the tool to add {a} and {b}", "What is {a} + {b}? Use the tool.", "Please compute {a} plus {b} with the function.",
         "*Use your tool: {a} + {b}"],
        ["Add two numbers", "Sum of two numbers", "Adds numbers"]),
    "multiply": Family(
        ["multiply", "times", "product"], ["numbers", "values", "two numbers", "integers", "factors"],
        {"a": (["a", "x", "first", "num1", "left"], "number"), "b": (["b", "y", "second", "num2", "right"], "number")},
        ["Multiply {a} by {b}.", "What is {a} times {b}?", "{a} * {b}", "What is {a} * {b}?", "{a} times {b}", "Product of {a} and {b}?", "Multiply {a} with {b}", "How much is {a} times {b}?", "What is the product of {a} and {b}?", "Calculate {a} * {b}", "{a} x {b}", "*Please multiply {a} and {b}."],
        ["Multiply two numbers", "Product of two numbers", "Multiplies numbers"]),
    "event": Family(
        ["create", "add", "new", "schedule", "plan", "book"], ["event", "meeting", "calendar event", "appointment"],
        {"s": (["title", "name", "summary", "subject"], "phrase"), "d": (["date", "day", "when"], "date"), "w": (["attendees", "people", "guests", "participants"], "names")},
        ['Create an event "{s}" on {d} with {w}.', 'Schedule "{s}" on {d} with {w}', 'Plan a meeting "{s}" for {d} with {w}.', 'Add "{s}" on {d} to my calendar with {w}',
         'Put "{s}" on {d} into the calendar with {w}', 'New event "{s}" on {d}, invite {w}', 'Set up a meeting "{s}" on {d} with {w}.', 'Book "{s}" for {d} with {w}', 'Meeting "{s}" on {d}: {w}', '*Please schedule "{s}" for {d} with {w}.'],
        ["Create a calendar event", "Schedule a meeting with people", "Adds an event to the calendar"]),
    "light": Family(
        ["set", "switch", "toggle", "control", "turn"], ["light", "lamp", "lights", "light state", "power"],
        {"r": (["room", "location", "area", "zone"], "room"), "o": (["on", "state", "enabled", "power", "is_on"], "onoff")},
        ["Turn {o} the light in the {r}.", "Switch {o} the lamp in the {r}", "Turn the {r} light {o}.", "Please turn {o} the {r} lights", "Lights {o} in the {r}",
         "Make the {r} light go {o}", "Light {o} in the {r} please", "I want the {r} light {o}.", "Put the {r} lamp {o}", "The light in the {r} should be {o}.", "{r} lights {o}", "Can you switch {o} the {r} light?", "*Could you turn {o} the light in the {r}?"],
        ["Turn a light on or off", "Controls the lights of a room", "Switch lamps"]),
    "translate": Family(
        ["translate", "convert", "do"], ["text", "translation", "sentence", "phrase", "language"],
        {"b": (["text", "sentence", "phrase", "content"], "phrase"), "l": (["language", "target_language", "to", "lang", "target"], "language")},
        ['Translate "{b}" to {l}.', 'Translate "{b}" into {l}', 'How do you say "{b}" in {l}?', 'What is "{b}" in {l}?', 'Translate {b} to {l}', 'Say "{b}" in {l}', '"{b}" in {l}?', 'Give me "{b}" in {l}.', 'I need "{b}" in {l}', 'Put "{b}" into {l}.', '*Please translate "{b}" to {l}.'],
        ["Translate text to a language", "Translation", "Translates a sentence"]),
    "stock": Family(
        ["get", "fetch", "check", "lookup", "show", "current"], ["stock price", "stock", "share price", "quote", "ticker", "market price"],
        {"s": (["symbol", "ticker", "stock", "code"], "ticker")},
        ["What is the stock price of {s}?", "Price of {s}?", "How much is {s} stock?", "Get the price of {s}", "Check the {s} share price", "How is {s} doing?", "{s} stock price?", "What does {s} cost?", "Show me the price of {s}.", "Quote for {s}", "Look up {s} shares", "What is {s} trading at?", "*Please get the stock price of {s}."],
        ["Get the stock price", "Price of a share by symbol", "Stock quote"], ["What are the stock prices of {x} and {y}?", "Get the price of {x} and {y}"]),
    "music": Family(
        ["play", "start", "queue", "stream"], ["music", "song", "track", "audio", "media"],
        {"s": (["song", "title", "track", "name"], "phrase"), "a": (["artist", "band", "by", "singer"], "name")},
        ['Play "{s}" by {a}.', 'Play the song "{s}" from {a}', 'I want to hear "{s}" by {a}', 'Put on "{s}" by {a}', 'Play {s} by {a}', 'Start "{s}" by {a}', 'Let me hear "{s}" from {a}.', 'Can you play "{s}" by {a}?', 'Music: "{s}" by {a}', '*Please play "{s}" by {a}.'],
        ["Play a song", "Plays music by an artist", "Music player"]),
    "route": Family(
        ["get", "find", "compute", "plan", "show"], ["distance", "route", "directions", "travel time", "path"],
        {"f": (["origin", "from", "start", "source", "from_city"], "string"), "t": (["destination", "to", "end", "target", "to_city"], "string")},
        ["How far is it from {f} to {t}?", "Distance from {f} to {t}", "Find the route from {f} to {t}.", "How do I get from {f} to {t}?", "Route from {f} to {t}", "Directions from {f} to {t}?", "What is the distance from {f} to {t}?", "I drive from {f} to {t}.", "Show the way from {f} to {t}", "From {f} to {t}: how far?", "*Please plan a route from {f} to {t}."],
        ["Distance between two cities", "Find a route", "Directions from one place to another"]),
    "flight": Family(
        ["book", "find", "search", "reserve"], ["flight", "plane", "train", "ticket", "trip"],
        {"f": (["origin", "from", "departure", "from_city"], "string"), "t": (["destination", "to", "arrival", "to_city"], "string"), "d": (["date", "day", "when"], "date")},
        ["Book a flight from {f} to {t} on {d}.", "I want to fly from {f} to {t} on {d}", "Find a ticket from {f} to {t} on {d}", "Fly me from {f} to {t} on {d}.", "Reserve a seat from {f} to {t} on {d}", "From {f} to {t} on {d}, please", "I need a ticket from {f} to {t} for {d}.", "Travel from {f} to {t} on {d}", "Get me a flight from {f} to {t} on {d}.", "Book a trip from {f} to {t} for {d}", "*Please book a trip from {f} to {t} on {d}."],
        ["Book a flight", "Find tickets", "Reserve a trip"]),
    "order": Family(
        ["order", "buy", "place", "add"], ["food", "items", "order", "cart", "groceries", "shopping list"],
        {"i": (["items", "products", "list", "dishes", "things"], "words")},
        ["Order {i}.", "I want to buy {i}", "Please order {i}", "Add {i} to my cart", "Buy {i}", "Get me {i}.", "Can you order {i}?", "I need {i}", "Put {i} on the list.", "Order for me: {i}", "Purchase {i}", "We need {i}.", "I would like {i}, please", "Create an order for {i}", "Shopping: {i}", "*Could you order {i} for me?"],
        ["Order items", "Place an order", "Adds items to the cart"]),
    "contact": Family(
        ["add", "create", "save", "new", "register"], ["contact", "person", "customer", "user", "member"],
        {"n": (["name", "full_name", "person"], "name"), "g": (["age", "years"], "integer"), "v": (["vip", "admin", "active", "is_member"], "flag")},
        ["Add {n}, age {g}, {v}.", "Create a contact for {n} who is {g} years old, {v}", "Save {n} ({g} years old, {v})", "*Please register {n}, {g} years old, {v}."],
        ["Add a contact", "Creates a person", "Register a user"]),
    "user": Family(
        ["get", "fetch", "find", "load", "delete", "show"], ["user", "customer", "account", "order", "invoice", "ticket", "product"],
        {"i": (["id", "user_id", "number", "key"], "integer")},
        ["Show me number {i}.", "Get the one with id {i}", "Look up id {i}", "Fetch number {i}", "I need the data for id {i}", "What is behind id {i}?", "Give me id {i}", "Find id {i}.", "Open number {i}", "Id {i} please", "Load number {i}.", "*Please load id {i}."],
        ["Get a record by id", "Load by number", "Lookup by id"], ["Look up the ids {x} and {y}.", "Get number {x} and number {y}"]),
    "dice": Family(
        ["roll", "throw"], ["dice", "die", "random dice"], {"s": (["sides", "num_sides", "faces"], "integer")},
        ["Roll a die with {s} sides.", "Roll a {s} sided dice", "Throw a dice with {s} sides", "*Please roll a {s} sided die."], ["Roll a die", "Dice roller"]),
    "reminder": Family(
        ["set", "create", "add", "new"], ["reminder", "task", "todo", "note"],
        {"b": (["text", "title", "task", "what"], "phrase"), "t": (["time", "at", "when", "due"], "clock")},
        ['Remind me to "{b}" at {t}.', 'Set a reminder "{b}" for {t}', 'At {t}, remind me: "{b}"', 'Remind me to {b} at {t}', 'At {t} I have to {b}. Remind me.', 'Reminder at {t}: "{b}"', 'Do not let me forget "{b}" at {t}.', 'Set a reminder at {t} to {b}', '*Please remind me at {t} to "{b}".'],
        ["Set a reminder", "Create a task with time", "Reminds the user"]),
}  # fmt: skip

_ROOMS = "kitchen bedroom bathroom garage garden office hall attic cellar balcony living_room dining_room nursery studio".split()
_LANGUAGES = "French German Spanish Italian Japanese Chinese Korean Russian Polish Dutch Greek Turkish Arabic Hindi Swedish".split()
_CURRENCIES = "USD EUR GBP JPY CHF CNY INR KRW SEK NOK PLN BRL MXN CAD AUD".split()


def _spoken_list(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _slot_value(draw: Draw, kind: str, param: Param) -> tuple[Any, str]:
    """The argument value of a slot and its spoken form."""
    simple: dict[str, Callable[[], str]] = {
        "string": lambda: f"{draw.city()}, {draw.one(list(CAPITALS))}" if draw.chance(0.08) else draw.city(),
        "name": draw.name,
        "phrase": lambda: draw.phrase_of_words(1, 4),
        "clock": lambda: draw.value("clock", lambda: f"{draw.number(0, 23):02}:{draw.number(0, 59):02}"),
        "date": lambda: draw.value("date", lambda: f"{draw.number(2024, 2030)}-{draw.number(1, 12):02}-{draw.number(1, 28):02}"),
        "currency": lambda: draw.one(_CURRENCIES),
        "language": lambda: draw.one(_LANGUAGES),
        "ticker": lambda: draw.value("ticker", lambda: "".join(draw.one(string.ascii_uppercase) for _ in range(draw.number(2, 4)))),
    }
    if kind in simple:
        text = simple[kind]()
        return text, text
    if kind == "integer":
        whole = draw.integer(999)
        return whole, str(whole)
    if kind == "number":
        number: int | float = draw.integer(999) if draw.chance(0.7) else draw.decimal()
        return number, str(number)
    if kind == "room":
        room = draw.one(_ROOMS).replace("_", " ")
        return room, room
    if kind == "onoff":
        on = draw.chance(0.5)
        return on, "on" if on else "off"
    if kind == "unit":
        unit = draw.one(param.enum)
        return unit, unit
    if kind == "flag":
        flag = draw.chance(0.5)
        spoken = param.name.replace("_", " ")
        return flag, f"{spoken} {draw.one(['yes', 'true'] if flag else ['no', 'false'])}"
    items = [draw.name() for _ in range(draw.number(1, 3))] if kind == "names" else draw.words(draw.number(1, 4))
    return items, _spoken_list(items)


_JSON_TYPE = {"integer": "integer", "number": "number", "onoff": "boolean", "flag": "boolean", "names": "array", "words": "array"}


def _long_description(draw: Draw, what: str) -> str:
    """A wordy description, as hand-written schemas have them."""
    if what == "city":
        return draw.one(["The city and country, e.g. Paris, France", "The city and state, e.g. San Francisco, CA", "City and country e.g. Bogota, Colombia",
                         "Name of the city to get the data for", "The location to look up"])  # fmt: skip
    return f"The {what} that is used for {draw.phrase_of_words(2, 6)}."


def build_spec(draw: Draw, family: Family) -> tuple[Spec, dict[str, tuple[str, Param]]]:
    """Declare a family's tool under a fresh name; returns the spec and, by slot key, (value kind, parameter)."""
    name = draw.value("tool", lambda: tool_name(draw, [draw.one(family.verbs), *draw.one(family.nouns).split()]
                      + ([draw.one(["v2", "tool", "api", "now", "by", "for", "data", "x"])] if draw.chance(0.25) else [])))  # fmt: skip
    slots: dict[str, tuple[str, Param]] = {}
    for key, (names, kind) in family.slots.items():
        param = Param(draw.one(names), _JSON_TYPE.get(kind, "string"))
        if kind == "unit":
            param.required = False
            param.enum = draw.one(
                [["celsius", "fahrenheit"], ["Celsius", "Fahrenheit"], ["C", "F"], ["metric", "imperial"], ["kelvin", "celsius"]]
            )
        if draw.chance(0.5):
            param.description = draw.one(
                [
                    f"The {param.name.replace('_', ' ')}",
                    _long_description(draw, family.slots[key][0][0]),
                    f"{param.name.replace('_', ' ').capitalize()} to use",
                    f"The {family.slots[key][0][0]}",
                ]
            )
        slots[key] = (kind, param)
    params = [p for _, p in slots.values()]
    if draw.chance(0.15):
        draw.rng.shuffle(params)
    return Spec(name, "", params, draw.one(family.descriptions) if draw.chance(0.9) else ""), slots


def natural_request(draw: Draw, family: Family, slots: dict[str, tuple[str, Param]]) -> tuple[str, dict[str, Any]]:
    """A natural question and the call's arguments in the order in which the question mentions them."""
    text = draw.phrase(family.asks)
    arguments: dict[str, Any] = {}
    for key in sorted((k for k in slots if "{" + k + "}" in text), key=lambda k: text.index("{" + k + "}")):
        kind, param = slots[key]
        value, spoken = _slot_value(draw, kind, param)
        arguments[param.name] = value
        text = text.replace("{" + key + "}", spoken)
    return text, arguments


def pair_request(draw: Draw, family: Family, slots: dict[str, tuple[str, Param]]) -> tuple[str, list[dict[str, Any]]]:
    """A question that needs the tool twice, and both calls' arguments."""
    kind, param = next(iter(slots.values()))
    first, second = _slot_value(draw, kind, param), _slot_value(draw, kind, param)
    text = draw.phrase(family.pair_asks).replace("{x}", first[1]).replace("{y}", second[1])
    return text, [{param.name: first[0]}, {param.name: second[0]}]
