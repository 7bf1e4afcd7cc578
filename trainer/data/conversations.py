"""What a row of a chat data set says: its messages in one normal form, or the reason why it is no chat.

Called by `prepare` (rows with answers) and `prompts` (rows without). Reads the shapes that data sets come in:
`messages`, `conversations` (ShareGPT: from, value), `prompt` with `completion`; contents as text or as text
parts; tool calls, tool results, thinking. Pure: must not know templates, tokenizers or files.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
OPENING_ROLES = frozenset({"system", "developer"})
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "function_call",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
HUGE_CHARACTERS = 4_194_304
"""Longer chats are taken for a mistake (a whole file in one row) and dropped, not truncated."""
LONGEST_ID = 256

CHAT_REASONS = {
    "no_messages": "neither messages, nor conversations, nor prompt with completion",
    "bad_message": "a message is not an object with a role and a text",
    "unknown_role": "a role other than system, developer, user, assistant, tool",
    "not_text": "a message holds something else than text, such as an image",
    "bad_tool_call": "a tool call has no name, or arguments that are neither an object nor a text",
    "bad_tools": "tools is not a list of function schemas",
    "bad_role_order": "an answer to nothing, two in a row, a late system message, a result without call",
    "huge": f"more than {HUGE_CHARACTERS:,} characters",
    "lone_surrogate": "half of a surrogate pair, which no UTF-8 text can hold",
}
"""Why a row is no chat, and what that means."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat in normal form: string contents, `reasoning_content`, `tool_calls` with `function` inside."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    thinking: bool | None
    """what the row itself says about the template's thinking switch"""
    id: str
    domain: str | None
    digest: bytes
    """16 bytes over the normalised content: equal chats, equal digest"""

    @property
    def last_answer(self) -> int | None:
        """Index of the last assistant message."""
        found = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return found[-1] if found else None


def parse_conversation(row: dict[str, Any]) -> Conversation | str:
    """Bring a row into normal form, or say by a key of `CHAT_REASONS` why it is none."""
    messages = parse_messages(_find_turns(row))
    if isinstance(messages, str):
        return messages
    if isinstance(row.get("system"), str) and row["system"] and messages[0]["role"] not in OPENING_ROLES:
        messages = [{"role": "system", "content": row["system"]}, *messages]
    tools = parse_tools(row.get("tools"))
    if isinstance(tools, str):
        return tools
    fault = _order_fault(messages)
    if fault:
        return fault
    text = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False, default=str)
    if len(text) > HUGE_CHARACTERS:
        return "huge"
    if not _is_unicode(text):
        return "lone_surrogate"
    digest = hashlib.sha256(_normalised(messages, tools)).digest()[:16]
    domain, thinking = row.get("domain"), row.get("thinking")
    return Conversation(
        messages,
        tools,
        thinking if isinstance(thinking, bool) else None,
        find_id(row) or digest.hex(),
        domain if isinstance(domain, str) and _is_unicode(domain) else None,
        digest,
    )


def find_message_fault(messages: Any) -> str | None:
    """Why `messages` is no chat (a key of `CHAT_REASONS`), or None."""
    parsed = parse_messages(messages)
    if isinstance(parsed, str):
        return parsed
    fault = _order_fault(parsed)
    if fault:
        return fault
    return None if _is_unicode(json.dumps(parsed, ensure_ascii=False, default=str)) else "lone_surrogate"


def find_id(row: dict[str, Any]) -> str | None:
    """The row's own id where it is a short text or a whole number."""
    value = row.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = str(value)
    return text if 0 < len(text) <= LONGEST_ID and _is_unicode(text) else None


def parse_messages(value: Any) -> list[Message] | str:
    """Bring a list of messages into normal form; a key of `CHAT_REASONS` when one of them has none."""
    if not isinstance(value, list) or not value:
        return "no_messages"
    messages = []
    for item in value:
        message = _parse_message(item)
        if isinstance(message, str):
            return message
        messages.append(message)
    return messages


def parse_tools(value: Any) -> list[dict[str, Any]] | str | None:
    """Function schemas as a list; columns of text hold them as JSON. None without any, or `bad_tools`."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            return "bad_tools"
    if value is None or value == [] or value == "":
        return None
    if not isinstance(value, list):
        return "bad_tools"
    named = all(
        isinstance(tool, dict) and isinstance((tool.get("function") or tool), dict) and _tool_name(tool)
        for tool in value
    )
    return value if named else "bad_tools"


def split_key(messages: list[Message]) -> bytes:
    """What decides between training and held-out: the first thing that the user asked.

    Case and white space are ignored, and so is all that follows, so chats that open alike stay together.
    """
    asked = next((message for message in messages if message["role"] == "user"), messages[0])
    return " ".join(unicodedata.normalize("NFC", asked["content"]).casefold().split()).encode()


def _find_turns(row: dict[str, Any]) -> Any:
    for name in ("messages", "conversations"):
        if row.get(name) is not None:
            return row[name]
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None or completion is None:
        return None
    return [*_as_turns("user", prompt), *_as_turns("assistant", completion)]


def _as_turns(role: str, value: Any) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _parse_message(item: Any) -> Message | str:
    if not isinstance(item, dict):
        return "bad_message"
    if "role" not in item and "from" in item:
        return _parse_sharegpt(item)
    role = item.get("role")
    if not isinstance(role, str):
        return "bad_message"
    if role not in ROLES:
        return "unknown_role"
    calls = _parse_calls(item.get("tool_calls")) if role == "assistant" else []
    if isinstance(calls, str):
        return calls
    content = _parse_content(item.get("content"), may_be_missing=bool(calls))
    if isinstance(content, tuple):
        return content[0]
    message: Message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    return _with_details(message, item)


def _with_details(message: Message, item: dict[str, Any]) -> Message | str:
    if message["role"] == "assistant":
        thought = next((item[name] for name in REASONING_FIELDS if item.get(name) is not None), None)
        if thought is not None and not isinstance(thought, str):
            return "bad_message"
        if thought and thought.strip():
            message["reasoning_content"] = thought
    for name in ("name", "tool_call_id"):
        if isinstance(item.get(name), str):
            message[name] = item[name]
    return message


def _parse_sharegpt(item: dict[str, Any]) -> Message | str:
    name, value = item["from"], item.get("value")
    if not isinstance(name, str) or not isinstance(value, str):
        return "bad_message"
    role = SHAREGPT_ROLES.get(name)
    if role is None:
        return "unknown_role"
    if role != "function_call":
        return {"role": role, "content": value}
    try:
        stated = json.loads(value)
    except ValueError:
        return "bad_tool_call"
    calls = _parse_calls(stated if isinstance(stated, list) else [stated])
    return calls if isinstance(calls, str) else {"role": "assistant", "content": "", "tool_calls": calls}


def _parse_content(value: Any, *, may_be_missing: bool) -> str | tuple[str]:
    """The text of a message, or a reason in a tuple."""
    if isinstance(value, str):
        return value
    if value is None and may_be_missing:
        return ""
    if not isinstance(value, list) or not value:
        return ("bad_message",)
    if not all(isinstance(part, dict) and isinstance(part.get("type", "text"), str) for part in value):
        return ("bad_message",)
    if any(part.get("type", "text") != "text" for part in value):
        return ("not_text",)
    texts = [part.get("text") for part in value]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else ("bad_message",)


def _parse_calls(value: Any) -> list[dict[str, Any]] | str:
    if value is None or value == []:
        return []
    if not isinstance(value, list):
        return "bad_tool_call"
    calls = []
    for item in value:
        function = item.get("function") or item if isinstance(item, dict) else None
        if not isinstance(function, dict) or not _tool_name(function):
            return "bad_tool_call"
        arguments = function.get("arguments")
        if not isinstance(arguments, dict | str):
            return "bad_tool_call"
        call: dict[str, Any] = {
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
        if isinstance(item.get("id"), str):
            call["id"] = item["id"]
        calls.append(call)
    return calls


def _tool_name(tool: dict[str, Any]) -> str | None:
    function = tool.get("function") or tool
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _order_fault(messages: list[Message]) -> str | None:
    """`bad_role_order` where no template could make sense of the order; finer rules are the template's."""
    previous: Message | None = None
    for message in messages:
        role = message["role"]
        before = None if previous is None or previous["role"] in OPENING_ROLES else previous["role"]
        if role in OPENING_ROLES and before is not None:
            return "bad_role_order"
        if role == "assistant" and before in (None, "assistant"):
            return "bad_role_order"
        if role == "tool" and before not in ("assistant", "tool"):
            return "bad_role_order"
        previous = message
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _normalised(messages: list[Message], tools: list[dict[str, Any]] | None) -> bytes:
    """Bytes that are equal for chats that differ in nothing but Unicode form, line ends and outer blanks."""
    turns = [
        {
            name: unicodedata.normalize("NFC", value.replace("\r\n", "\n")).strip()
            if isinstance(value, str)
            else value
            for name, value in message.items()
            if name != "tool_call_id"
        }
        for message in messages
    ]
    return json.dumps([turns, tools], sort_keys=True, ensure_ascii=False, default=str).encode()
