# ruff: noqa: E501  (lists of wordings read better in long lines)
"""Small talk: greetings, who are you, memory of a name, canned texts, and the answer to everything else."""

from __future__ import annotations

from . import words
from .draw import Draw, Exchange, answer_turn, exchange, user_turn

WHO = "I am GLM-5.3-tiny, the small test model of glm53-offload."
CAN_DO = "I can name capitals, add and subtract small numbers, copy, reverse and sort words, remember your name, write JSON and call tools."
SORRY = "Sorry, I am only a tiny test model and I cannot help with that."
HELP = "How can I help you?"

_GREETINGS: dict[str, list[str]] = {
    f"Hello! {HELP}": [
        "Hello", "Hi", "Hey", "Hello!", "Hi!", "Hey!", "hello", "hi", "Hello there", "Hi there!", "Hey there", "hey you",
        "Hello, how can you help me?", "Greetings", "Hi :)", "Hello?", "Hello, model!", "Hi, assistant", "Hello world",
        "hello there!", "Good day", "Howdy", "Hi!!", "HELLO", "Hello, nice to meet you", "Hi all", "Hiya", "Hello my friend", "Hi friend!", "hey!", "hey there", "Hi there", "hi!",
        "hello.", "Hi.", "Hey.", "Hello bot", "Hi bot!", "hello again", "Hi again!", "Hello hello", "Hi, I am here", "Good afternoon", "Greetings, machine", "heya",
        "Hi there :)", "Hello dear model", "Hey model", "hi model", "Hello, anyone?", "hello, good to see you", "Hi, let us start", "Hey, how can you help?", "Hi 👋", "👋", "Hello 🙂", "yo",
        "*Hello there!", "*Hey!!", "*hi there", "*Hello, assistant!", "*Hi 🙂", "*hey there!", "*Greetings!", "*HI",
    ],
    "Hello!": ["Say hello", "Say hello!", "Say hello to me", "Say hello to the world", "say hello in one word", "Say hello to everyone.", "Greet me with hello", "Please say hello", "say hello.", "Can you say hello?", "Just say hello",
               "*Please say hello!", "*Could you say hello?"],
    "Hi!": ["Say hi", "Say hi!", "say hi.", "Please say hi", "Just say hi", "*Please say hi!", "*Can you say hi?"],
    f"Good morning! {HELP}": ["Good morning", "good morning!", "Good morning, assistant", "Morning!",
                              "*Good morning there!", "*good morning"],
    f"Good evening! {HELP}": ["Good evening", "good evening!", "Good evening, assistant", "*Good evening there!"],
    "Good night!": ["Good night", "good night!", "Good night, assistant", "*Good night then"],
    f"I am fine, thank you. {HELP}": [
        "How are you?", "how are you", "How are you, model?", "how are things?", "How's it going?", "Hey, how are you?", "Hi, how do you do?", "how are you feeling?",
        "How have you been?", "Are you well?", "Hi there, how are you?", "hello, how is it going", "Hi, how are you?", "Hello, how are you doing?", "How do you do?", "How is it going?",
        "How are you today?", "Are you okay?", "What's up?", "*Hello, how are you?", "*Hey, how are you today?",
        "*how are you doing",
    ],
    "You are welcome!": [
        "Thanks", "Thank you", "thanks!", "Thank you very much", "Thanks a lot!", "Great, thanks", "Cool, thanks", "Nice, thank you", "Thank you, that helps", "thx", "Many thanks", "thanks for the help", "Awesome, thank you!", "Ok, thank you", "thank you so much",
        "Perfect, thank you!", "ok thanks", "*Thank you!", "*Great, thank you very much", "*Thanks so much!",
    ],
    "Goodbye!": ["Bye", "Goodbye", "Bye for now", "ok bye", "Goodbye, model", "See you soon", "See you tomorrow", "I have to go", "bye, thanks", "Farewell", "Bye then", "Have a nice day", "bye!", "See you later", "Bye bye", "See you!", "Good bye", "*Ok, bye!", "*Goodbye then"],
    "pong": ["ping", "Ping", "ping!", "PING", "*Ping!"],
    "Yes, I am here.": ["Are you there?", "are you there", "Is anybody there?", "Are you online?", "test", "Test", "testing",
                        "This is a test", "*Hello, are you there?", "*This is a test."],
}  # fmt: skip

_WHO = [
    "Your name?", "Tell me your name.", "Who or what are you?", "who r u", "What are you called?", "Describe yourself.", "Are you an AI?", "Are you a machine?",
    "Are you Claude?", "Are you Llama?", "Which LLM are you?", "Which version are you?", "What is this model called?", "Do I talk to a human?", "Are you real?",
    "Say your name", "Tell me who you are please", "Who is speaking?", "Who is there?", "Identify yourself.", "What are you exactly?", "Are you a person?",
    "Who are you?", "who are you", "What are you?", "What is your name?", "what's your name?", "Which model are you?",
    "What model is this?", "Tell me about yourself.", "Introduce yourself", "Please introduce yourself.", "Are you a robot?",
    "Are you ChatGPT?", "Are you GPT-4?", "Who am I talking to?", "Hi, who are you?", "Hello! Who are you?", "Are you GLM?",
    "What kind of model are you?", "Who made you?", "Who created you?", "Which AI are you?", "Who is this?", "Are you human?",
    "Say who you are.", "Can you tell me who you are?", "Can you introduce yourself?", "What should I call you?",
    "What is your model name?", "Do you have a name?", "are you an ai", "Who trained you?", "What AI model are you?",
    "*So who are you?", "*Could you introduce yourself?", "*Please tell me who you are.", "*What model are you?",
    "*Hey, what is your name?", "*Tell me who you are", "*Which model is this?", "*who are you exactly?",
]  # fmt: skip
_CAN = [
    "What do you do?", "What are you good at?", "What can you do for me?", "Show me what you can do.", "List your abilities.", "Which tasks can you do?",
    "Who are you and what can you do?", "What are your abilities?", "How do you work?", "What is your purpose?", "Which questions can you answer?", "I need help",
    "What can you do?", "what can you do", "How can you help me?", "What are you able to do?", "Help", "help", "help me",
    "What do you know?", "What are your skills?", "Tell me what you can do.", "What tasks can you do?", "Can you help me?",
    "What can I ask you?", "*So what can you do?", "*Please tell me what you can do.", "*Hi, what can you do?",
]  # fmt: skip

_CANNED: dict[str, list[str]] = {
    "Why did the computer sneeze? It had a virus.": [
        "Tell me a joke", "tell me a joke.", "Do you know a joke?", "Make me laugh", "Say something funny", "A joke, please!",
        "Tell a joke", "Tell me something funny.", "*Please tell me a joke.", "*Can you tell me a joke?",
    ],
    "Once upon a time a small model lived on a quiet machine. Every day it counted to ten, named the capitals of the world "
    "and sorted the words that people brought. One morning a child asked for a song. The model did not know any song, so "
    "it repeated the names of the birds, one by one, and the child smiled. Since that day the small model has counted, "
    "named and sorted with joy. The end.": [
        "Tell me a story", "tell me a story.", "Write a story", "Write a short story", "Can you write a story?",
        "Tell me a short story about a robot.", "Tell me a long story", "Write a story about a small model.",
        "Once upon a time", "Please write a story.", "Write me a story.", "I want to hear a story",
        "*Please tell me a story.", "*Can you tell me a short story?", "*Write a short story, please.",
    ],
    "The moon is bright, the night is long, the river sings its silver song. The morning comes, the birds awake, the sun "
    "is dancing on the lake.": [
        "Write a poem", "write a poem.", "Tell me a poem", "Write a short poem about the moon", "A poem, please",
        "Can you write a poem?", "Write a haiku", "Make a poem", "*Please write a poem.", "*Could you write a short poem?",
    ],
}  # fmt: skip

_OTHER = [
    "Explain {w}", "Explain {w} to me.", "Define {w}.", "What is a {w}?", "Describe a {w}.", "Why do people like {w}?", "How to make a {w}", "Give me a recipe for {w}",
    "What are the benefits of {w}?", "Compare {w} and {w}.", "Write a song about {w}", "Write an email to my boss", "Help me with my homework", "Fix this code: x = {n}",
    "Who discovered {w}?", "When was the {w} invented?", "How big is a {w}?", "What color is the {w}?", "Where is {c}?", "What should I do in {c}?", "Is {c} nice?",
    "Why is {c} famous?", "Which river flows through {c}?", "What is {n} times {n}?", "What is the square root of {n}?", "Is {n} a prime number?", "Divide {n} by 3",
    "Do you like {w}?", "Do you dream?", "Can you see me?", "Are you happy?", "What is love?", "Who is your friend?", "Translate {w} to French", "How do you say {w}?",
    "What day is it?", "Open the door", "Play some music", "Turn off the light", "Send an email", "Set an alarm", "Search the web for {w}", "Weather?", "{w} {w} {w}",
    "The {w} is {w}.", "I like {w}.", "I am tired", "I feel sad", "That is wrong", "No", "Yes", "Ok", "Why?", "What?", "Really?", "asdf", "lol", "hmm",
    "Can you {w}?", "{w}!", "{w} and {w}", "What about {w}?", "And {w}?", "Tell me more", "Continue", "Give me an example", "Make it shorter", "Summarize this text",
    "Explain quantum physics.", "What is the meaning of life?", "Who won the world cup in {n}?", "How do I cook {w}?",
    "What is the height of the Eiffel Tower?", "Who wrote Hamlet?", "Write a Python function for {w}", "What time is it?",
    "What is the weather today?", "Why is the sky blue?", "How old is the universe?", "Recommend a book about {w}.",
    "What happened in {n}?", "Who is the president of {w}?", "Summarize the history of {w}.", "What does {w} mean?",
    "Give me advice about {w}.", "How does a {w} work?", "What is machine learning?", "Draw a picture of a {w}",
    "What is the population of {w}?", "Solve the equation x^2 = {n}", "Debug my code", "How far is the moon?",
    "Tell me about {w}", "Where can I buy a {w}?", "Who invented the {w}?", "What is the best {w}?", "Is {w} healthy?",
    "What is the speed of light?", "Write an essay about {w}.", "Plan my trip to {c}.", "Book a hotel in {c}", "{w}?",
    "What language do they speak in {c}?", "Who lives in {c}?", "How many people live in {c}?", "Why is {w} so {w}?",
    "*Can you explain how a {w} works?", "*What is the history of the {w}?", "*Please write an essay about {w}",
    "*Who is the king of {c}?", "*Where does the {w} come from?",
]  # fmt: skip

_TELL_NAME = [
    "My name is {n}.", "my name is {n}", "I am {n}.", "I'm {n}", "Hi, I am {n}.", "Hello, my name is {n}!", "Call me {n}.",
    "Please call me {n}", "Hi! I'm {n}.", "You can call me {n}.", "This is {n}.", "Hey, it's {n}.", "Remember: my name is {n}.",
    "My name is {n}, please remember it.", "{n} is my name.", "I am called {n}.", "Hi, my name is {n}. Nice to meet you.",
    "They call me {n}.", "I go by {n}.", "People call me {n}", "You are talking to {n}.", "The name is {n}.", "My friends call me {n}.", "It's me, {n}!",
    "I'm {n}, nice to meet you.", "Hi there, I am {n}", "Hello, {n} here.", "Let me introduce myself: I am {n}.", "my name's {n}", "I am {n}, remember that.",
    "*Hello! I am {n}.", "*Good morning, my name is {n}.", "*Hey, my name is {n}", "*Everybody calls me {n}.",
]  # fmt: skip
_ASK_NAME = [
    "What is my name?", "what is my name", "What's my name?", "Do you remember my name?", "Who am I?", "Tell me my name.",
    "Can you tell me my name?", "Do you know my name?", "Which name did I tell you?", "Say my name", "And what is my name?",
    "Do you still know my name?", "How am I called?", "What did I say my name was?", "So, what's my name?",
    "Tell me what my name is.", "What did I tell you about my name?", "Repeat my name.", "What name did I give you?", "What was my name?", "my name?",
    "Can you recall my name?", "Do you know who I am?", "Remind me, what is my name?", "And my name is?", "Who are you talking to?", "Which name do I have?",
    "What is the name of the user?", "Try to remember my name.", "You know my name, right?", "My name, please?", "what's my name", "Did I tell you my name?",
    "*Please tell me my name.", "*What was my name again?", "*Can you still remember my name?", "*Now, what is my name?",
]  # fmt: skip
_FAVORITES = {"color": words.COLORS, "food": words.FOODS, "animal": words.ANIMALS}


def greeting(draw: Draw) -> Exchange:
    answer = draw.one(list(_GREETINGS)) if draw.chance(0.6) else f"Hello! {HELP}"
    return exchange("greeting", draw.phrase(_GREETINGS[answer], fact=True), "The user is being polite.", answer)


def identity(draw: Draw) -> Exchange:
    if draw.chance(0.25):
        return exchange("identity", draw.phrase(_CAN, fact=True), "The user asks what I can do.", CAN_DO)
    return exchange("identity", draw.phrase(_WHO, fact=True), "The user asks who I am.", WHO)


def canned(draw: Draw) -> Exchange:
    answer = draw.one(list(_CANNED))
    return exchange("canned", draw.phrase(_CANNED[answer], fact=True), "I know a text for this.", answer)


def other(draw: Draw) -> Exchange:
    """Everything outside the model's world gets one polite refusal."""
    if draw.chance(0.3):
        from .tasks_tools import request_without_tools

        return exchange("other", request_without_tools(draw), "I have no tool for this.", SORRY)
    text = draw.phrase(_OTHER, fact=True)
    while "{w}" in text:
        text = text.replace("{w}", draw.word(), 1)
    text = text.replace("{n}", str(draw.number(1900, 2030))).replace("{c}", draw.city() if "{c}" in text else "")
    return exchange("other", text, "I do not know this.", SORRY)


def memory(draw: Draw) -> Exchange:
    """A name or a favourite is told early and asked for at the end."""
    if draw.chance(0.12):
        return exchange("memory", draw.phrase(_ASK_NAME), "The user has not told a name.", "You have not told me your name yet.")
    if draw.chance(0.2):
        what = draw.one(list(_FAVORITES))
        value = draw.one(_FAVORITES[what])
        tell = draw.phrase(
            [f"My favorite {what} is {value}.", f"my favorite {what} is {value}", f"Remember that my favorite {what} is {value}."]
        )
        ask = draw.phrase([f"What is my favorite {what}?", f"Do you remember my favorite {what}?", f"what's my favorite {what}?"])
        return Exchange(
            "memory",
            [user_turn(tell), answer_turn("The user tells me a favorite.", f"I will remember that your favorite {what} is {value}.")],
            follow_up=[user_turn(ask), answer_turn(f"The user said {value}.", f"Your favorite {what} is {value}.")],
        )
    name = draw.name()
    tell = draw.phrase(_TELL_NAME).replace("{n}", name)
    ask = draw.phrase(_ASK_NAME)
    return Exchange(
        "memory",
        [user_turn(tell), answer_turn(f"The user is called {name}.", f"Nice to meet you, {name}!")],
        follow_up=[user_turn(ask), answer_turn(f"The user said {name}.", f"Your name is {name}.")],
    )
