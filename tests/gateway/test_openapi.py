"""/openapi.json tells the truth: it lists every URL, and a fuzzer that believes it finds no contradiction."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from services.gateway.openapi import OPERATIONS, document
from tests.gateway.stack import MODEL, Stack

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_every_url_is_described(stack: Stack) -> None:
    """What the app serves and what the document lists are the same."""
    groups = [included.original_router.routes if hasattr(included, "original_router") else [included] for included in stack.app.routes]
    routes = [route for group in groups for route in group]
    served = {(route.path.replace(":path}", "}"), method.lower()) for route in routes for method in route.methods - {"HEAD"}}
    assert {(operation.path, operation.method) for operation in OPERATIONS} == served


def test_the_document_is_complete(stack: Stack) -> None:
    """References lead somewhere, the model is the served one, keys are mentioned where they are asked for."""
    found = stack.http.get("/openapi.json").json()
    schemas = found["components"]["schemas"]
    text = json.dumps(found)
    for part in text.split('"$ref": "')[1:]:
        name = part.split('"')[0]
        assert name.startswith("#/components/schemas/")
        assert name.rpartition("/")[2] in schemas
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == [MODEL]
    assert "security" not in found
    assert document(MODEL, with_keys=True)["security"] == [{"key": []}]
    assert "422" not in found["paths"]["/v1/chat/completions"]["post"]["responses"]


def test_what_is_refused_is_described(stack: Stack) -> None:
    """Options that do not exist, keys that are no token ids, names and schemas of tools: the document says what the checks say."""
    schemas = stack.http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("TemplateOptions", "Reasoning", "ThinkingSwitch"):
        assert schemas[name]["additionalProperties"] is False
    keys = re.compile(schemas["ChatRequest"]["properties"]["logit_bias"]["propertyNames"]["pattern"])
    for key, status in {"0": 200, "42": 200, "05": 400, "x": 400, "-1": 400}.items():
        assert (stack.post(logit_bias={key: 1}).status_code == 200) == (status == 200) == bool(keys.match(key))
    names = re.compile(schemas["Function"]["properties"]["name"]["pattern"])
    for name, status in {
        "a.b/c:d": 200,
        "🦊": 200,
        "wörter": 200,
        "a b": 400,
        "a<b": 400,
        "a\x00b": 400,
        "a\nb": 400,
        "a\x7f": 400,
    }.items():
        answer = stack.post(tools=[{"type": "function", "function": {"name": name}}])
        assert (answer.status_code == 200) == (status == 200) == bool(names.match(name)), name
    for schema, field in (("Function", "parameters"), ("ResponseTool", "parameters"), ("AnthropicTool", "input_schema")):
        assert "uniqueItems" in json.dumps(schemas[schema]["properties"][field])


def test_a_fuzzer_finds_no_contradiction(tmp_path: Path) -> None:
    """Schemathesis: no server error, no undocumented status or content type, no answer that breaks its schema."""
    stack = Stack()
    try:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{stack.url}/openapi.json", "--checks", CHECKS]
        command += ["--phases", "coverage,fuzzing", "--max-examples", "3", "--seed", "1", "--no-color"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    finally:
        stack.close()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    tested = re.search(r"Tested: (\d+)", done.stdout)
    assert tested is not None
    assert int(tested.group(1)) >= len(OPERATIONS) - 1, "the document itself is not fuzzed, everything else is"
