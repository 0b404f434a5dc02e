"""The server that a client's checks talk to, from the environment."""

from __future__ import annotations

import os

URL = os.environ.get("GLM53_TEST_URL", "http://127.0.0.1:30000")
MODEL = os.environ.get("GLM53_TEST_MODEL", "glm-5.3-tiny")
FRANCE = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
