"""Answers that have to be a value of a schema: how they are asked for, and how they are read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from skep.models.exchange import Request
from skep.models.spec import ModelSpec

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models import ModelRequestParameters

ANSWER = "answer"
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_MOST_COMPLAINTS = 5

Value = TypeVar("Value", bound=BaseModel)


class NotTheSchema(ValueError):
    """An answer is not a value of the schema; the message says where, in words a model can act on."""


def parameters(request: Request, spec: ModelSpec) -> ModelRequestParameters:
    """Say which tools there are and which form the answer has to have.

    A model that can be held to a schema calls the tool `answer` with the value, or writes it where its provider has a
    way of its own for that; any other is told the schema, and its text is read.
    """
    from pydantic_ai import ToolDefinition
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.output import OutputObjectDefinition

    if request.schema is None:
        return ModelRequestParameters(function_tools=list(request.tools))
    shape, about = request.schema.model_json_schema(), request.schema.__doc__
    return ModelRequestParameters(
        function_tools=list(request.tools),
        output_mode="auto" if spec.supports_json else "prompted",
        output_tools=[ToolDefinition(name=ANSWER, description=about, parameters_json_schema=shape, kind="output")],
        output_object=OutputObjectDefinition(json_schema=shape, name=request.schema.__name__, description=about),
        allow_text_output=bool(request.tools) or not spec.supports_json,
    )


def read_value(response: ModelResponse, schema: type[Value]) -> Value:
    """Read the value out of a call of `answer`, or out of the text."""
    calls = [call for call in response.tool_calls if call.tool_name == ANSWER]
    said = calls[0].args_as_json_str() if calls else _json_in(response.text or "")
    try:
        return schema.model_validate_json(said)
    except ValidationError as error:
        raise NotTheSchema(_complaints(error)) from error


def _json_in(text: str) -> str:
    """Cut the JSON out of the prose that models put around it."""
    fenced = _FENCED.search(text)
    text = fenced[1] if fenced else text
    begin, end = text.find("{"), text.rfind("}")
    return text[begin : end + 1] if 0 <= begin < end else text


def _complaints(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False)
    lines = [f"{'.'.join(map(str, each['loc'])) or 'the answer'}: {each['msg']}" for each in found[:_MOST_COMPLAINTS]]
    more = len(found) - _MOST_COMPLAINTS
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
