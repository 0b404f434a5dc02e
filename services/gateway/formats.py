"""What a request may ask of the form of its answer, in OpenAI's words and in vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# Of a list only the first error counts: making a million of them takes a minute.
FIRST = Field(fail_fast=True)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# JSON has one kind of number: clients in languages that have floats only write 128.0. Not for token ids, which come by the million.
Int = Annotated[int, BeforeValidator(_whole)]


class Body(BaseModel):
    """Strict types, unknown fields kept apart."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class JsonSchemaFormat(Body):
    """`response_format.json_schema`."""

    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TagStructure(Body):
    """One structure of a structural tag: JSON of a schema between two texts."""

    begin: Annotated[str, Field(min_length=1, max_length=512)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    end: Annotated[str, Field(max_length=512)]


Trigger = Annotated[str, Field(min_length=1, max_length=512)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024), FIRST]


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=128), FIRST] | None = None
    triggers: Annotated[list[Trigger], Field(min_length=1, max_length=128), FIRST] | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("of type json_schema needs json_schema: {name, schema}")
        if self.type == "structural_tag":
            if self.structures is None or self.triggers is None:
                raise ValueError("of type structural_tag needs structures: [{begin, schema, end}] and triggers: [text]")
            for structure in self.structures:
                if not any(structure.begin.startswith(trigger) for trigger in self.triggers):
                    raise ValueError(f"has the structure {structure.begin[:60]!r}, which begins with none of the triggers")
        return self


class StructuredOutputs(Body):
    """`structured_outputs`, as vLLM has it: exactly one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.given) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar, json_object")
        return self

    @property
    def given(self) -> list[str]:
        """Names of the fields that ask for something."""
        values = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        return [name for name, value in values.items() if value is not None]
