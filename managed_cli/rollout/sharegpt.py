"""ShareGPT conversations: `conversations` with `from` and `value`, or with `role` and `content`."""

from __future__ import annotations

from managed_cli.errors import InputError
from managed_cli.rollout.jsonl import fault, quoted
from managed_cli.types import Message

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
}
"""Who speaks in published data sets of this form → the role of a message."""

DROPPED_TURNS_FIELD = "dropped_turns"
"""Where the answers at the end of a conversation are kept: they are not sent, but may be wanted as references."""


def parse_conversation(value: object, *, keep_last_assistant: bool) -> tuple[list[Message], list[Message]]:
    """The messages that are sent, and the assistant's at the end that are not.

    Raises:
        InputError: names the turn by its index from 0.
    """
    if not isinstance(value, list) or not value:
        raise fault("conversations", "a list of turns", value)
    messages = [_message(f"conversations[{index}]", turn) for index, turn in enumerate(value)]
    if keep_last_assistant:
        return messages, []
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise InputError(
            "`conversations`: expected a turn that is not the assistant's, since its last turns are sampled anew",
            hint="`--keep-last-assistant` continues the last turn instead",
        )
    return messages[:end], messages[end:]


def _message(place: str, turn: object) -> Message:
    if not isinstance(turn, dict):
        raise fault(place, "an object with `from` and `value`", turn)
    plain = "role" in turn and "from" not in turn
    speaker_key, content_key = ("role", "content") if plain else ("from", "value")
    speaker = turn.get(speaker_key)
    role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        came = quoted(speaker) if isinstance(speaker, str) else "none"
        raise InputError(f"`{place}.{speaker_key}`: expected one of {', '.join(ROLES)}, came {came}")
    content = turn.get(content_key)
    if content_key == "value" and not isinstance(content, str):
        raise fault(f"{place}.value", "a string", content)
    others = {name: given for name, given in turn.items() if name not in (speaker_key, content_key)}
    # Without `content` it stays without: an assistant's turn may hold tool calls alone, and the check says the rest.
    return {"role": role, **({"content": content} if content_key in turn else {}), **others}
