"""Converts rows of chat files to messages in Hugging Face's form.

Supported forms: Hugging Face's and OpenAI's (`role`, `content`), and ShareGPT's (`from`, `value`). A row that cannot be used
exactly becomes a `Faulty` with its reason, so that the caller may refuse or count it; nothing is repaired by a guess. Not
supported: images and sounds, OpenAI's older `function_call`, and preference pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.data.documents import Completion, Conversation, Faulty, Message
from octavo.data.json_objects import RepeatedKey, decode

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response"), "tool"),
    "function_call": "assistant",
}
_ASKED = ("weight", "train", "loss")
"""Keys of a message with 0 or 1 for whether it is trained (OpenAI's, Axolotl's, ms-swift's)."""
_SHOWN = 60


class _Fault(Exception):
    """A row that is not an example: a reason for counts, and a sentence."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.found = Faulty(reason, sentence)


def conversation(row: Mapping[str, Any], column: str) -> Conversation | Faulty:
    """The conversation of a row: messages in `column`, and the row's `tools`, `system` and `chat_template_kwargs`."""
    try:
        messages, asked = _messages(_decoded(row[column], column), column)
        system = row.get("system")
        if isinstance(system, str) and system.strip():
            if messages[0]["role"] == "system":
                raise _Fault("two system messages", f"{column!r} begins with a system message, but 'system' is set too")
            messages.insert(0, {"role": "system", "content": system})
            asked.insert(0, True)
        if not any(message["role"] == "assistant" for message in messages):
            raise _Fault("no assistant's turn", f"none of the {len(messages)} messages is an assistant's")
        return Conversation(messages, asked, _tools(row), _variables(row))
    except _Fault as fault:
        return fault.found


def completion(row: Mapping[str, Any]) -> Completion | Conversation | Faulty:
    """The example of a row with `prompt` and `completion`: both strings, or both messages."""
    prompt, answer = row["prompt"], row["completion"]
    try:
        if isinstance(prompt, str) and isinstance(answer, str):
            for name, text in (("prompt", prompt), ("completion", answer)):
                if not text:
                    raise _Fault("empty content", f"{name!r} is empty")
            return Completion(prompt, answer)
        if isinstance(prompt, str) or isinstance(answer, str):
            raise _Fault("no messages", "'prompt' and 'completion' must both be strings, or both lists of messages")
        before, _ = _messages(prompt, "prompt")
        after, asked = _messages(answer, "completion")
        if not any(message["role"] == "assistant" for message in after):
            raise _Fault("no assistant's turn", "'completion' has no message of the assistant")
        return Conversation([*before, *after], [False] * len(before) + asked, _tools(row), _variables(row))
    except _Fault as fault:
        return fault.found


def strings(value: object) -> list[str]:
    """All strings in messages or tools, including keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, each in value.items() for text in (*strings(key), *strings(each))]
    if isinstance(value, Sequence):
        return [text for each in value for text in strings(each)]
    return []


def _messages(value: object, column: str) -> tuple[list[Message], list[bool]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(each, Mapping) for each in value):
        raise _Fault("no messages", f"{column!r} is not a list of messages: {_shortened(value)}")
    if not value:
        raise _Fault("no messages", f"{column!r} is an empty list")
    messages = [_message(each, number, column) for number, each in enumerate(value, start=1)]
    return [message for message, _ in messages], [asked for _, asked in messages]


def _message(entry: Mapping[str, Any], number: int, column: str) -> tuple[Message, bool]:
    """A message, and True if it is trained."""
    where = f"message {number} of {column!r}"
    values = _without_none(entry)  # in a table each row has all keys
    asked = True
    for key in _ASKED:
        if key in values:
            if values[key] not in (0, 1):
                raise _Fault("weights", f"{where} has {key!r} = {_shortened(values[key])}: 0 and 1 are known")
            asked = bool(values.pop(key))
    _refuse_two_forms(values, where)
    message = _of_sharegpt(values, where) if "from" in values and "role" not in values else dict(values)
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise _Fault(
            "unknown role", f"{where} has the role {_shortened(role)}: known are {known}, and ShareGPT's names of them"
        )
    if "function_call" in message:
        raise _Fault("function_call", f"{where} has OpenAI's older 'function_call': write it as 'tool_calls'")
    if "content" in message:
        message["content"] = _text(message["content"], where)
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(each, where) for each in message["tool_calls"]]
    else:
        message.pop("tool_calls", None)
    blank = not str(message.get("content", "")).strip()
    if blank and role != "tool" and not (role == "assistant" and "tool_calls" in message):
        raise _Fault("empty content", f"{where} ({role}) has no text")
    return message, asked


def _refuse_two_forms(values: Mapping[str, Any], where: str) -> None:
    """Refuse a message of both forms whose texts or roles differ: one of them would be lost."""
    texts = {"content": values.get("content"), "value": values.get("value")}
    roles = {"role": values.get("role"), "from": values.get("from")}
    if "role" in values and isinstance(roles["from"], str):
        roles["from"] = _SHAREGPT_ROLES.get(roles["from"], roles["from"])
    if "role" in values and not isinstance(texts["value"], str):  # a rating, for example
        texts["value"] = None
    for both in (roles, texts):
        first, second = both.values()
        if first is not None and second is not None and first != second:
            shown = " and ".join(f"{key!r} = {_shortened(values[key])}" for key in both)
            raise _Fault("two forms", f"{where} has {shown}: keep one of the two")


def _of_sharegpt(values: Mapping[str, Any], where: str) -> Message:
    name = values["from"]
    role = _SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        known = ", ".join(_SHAREGPT_ROLES)
        raise _Fault("unknown role", f"{where} is from {_shortened(name)}: known are {known}")
    if "value" not in values:
        raise _Fault("empty content", f"{where} has no 'value'")
    message = {key: value for key, value in values.items() if key not in ("from", "value")}
    if name != "function_call":
        return {"role": role, "content": values["value"], **message}
    calls = _decoded(values["value"], "value")
    return {"role": role, "tool_calls": calls if isinstance(calls, list) else [calls], **message}


def _text(content: object, where: str) -> str:
    """The text of a message: a string, or OpenAI's list of parts of type text."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [_without_none(part) for part in content if isinstance(part, Mapping)]
        if len(parts) == len(content) and all(set(part) == {"type", "text"} and part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        kinds = sorted({str(part.get("type")) for part in parts} - {"text"})
        raise _Fault("not only text", f"{where} has parts of type {', '.join(kinds) or 'unknown'}: Octavo trains only on text")
    raise _Fault("not only text", f"{where} has a 'content' that is not text: {_shortened(content)}")


def _tool_call(call: object, where: str) -> Message:
    """A tool call with its arguments as an object. OpenAI's files have a JSON string, which templates would quote twice."""
    if not isinstance(call, Mapping):
        raise _Fault("tool calls", f"{where} has a tool call that is not an object: {_shortened(call)}")
    function = call.get("function", call if "name" in call else None)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _Fault("tool calls", f"{where} has a tool call without a function name: {_shortened(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = decode(arguments) if arguments.strip() else {}
        except RepeatedKey as error:
            raise _Fault("repeated key", f"{where}: in the arguments of {function['name']!r}, {error}") from None
        except ValueError:
            raise _Fault("tool calls", f"{where}: the arguments of {function['name']!r} are not JSON") from None
    if not isinstance(arguments, Mapping):
        raise _Fault("tool calls", f"{where}: the arguments of {function['name']!r} are not an object: {_shortened(arguments)}")
    others = {} if function is call else {key: value for key, value in call.items() if key != "function"}
    return {**others, "type": "function", "function": {**function, "arguments": dict(arguments)}}


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if row.get("functions"):
        raise _Fault("functions", "'functions' is OpenAI's older form: name the column 'tools'")
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _decoded(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise _Fault("tools", f"'tools' is not a list of JSON schemas: {_shortened(tools)}")
    schemas = []
    for tool in map(_without_none, tools):
        function = tool.get("function", tool if "name" in tool else None)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _Fault("tools", f"'tools' has an entry without a function name: {_shortened(tool)}")
        schemas.append(tool if "function" in tool else {"type": "function", "function": tool})
    return schemas


def _variables(row: Mapping[str, Any]) -> dict[str, Any]:
    variables = row.get("chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise _Fault("chat_template_kwargs", f"'chat_template_kwargs' is not an object: {_shortened(variables)}")
    return dict(_without_none(variables))


def _decoded(value: object, name: str) -> Any:
    """A value, also from a table's string of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return decode(value)
    except RepeatedKey as error:
        raise _Fault("repeated key", f"{name!r}: {error}") from None
    except (ValueError, RecursionError):
        raise _Fault("no messages", f"{name!r} is a string that is not JSON: {_shortened(value)}") from None


def _without_none(value: Any) -> Any:
    """Objects without None values, at any depth: Arrow gives each object all keys of its column."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
