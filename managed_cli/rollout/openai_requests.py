"""Requests to OpenAI's endpoints as samples: lines of a batch file, and the Responses parameters of NeMo-Gym.

A parameter is sent where this recorder can send it, and kept as a field where it changes nothing that is recorded. One
that changes what is sampled and cannot be sent makes its line unusable, unless its value says what happens anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from managed_cli.errors import InputError
from managed_cli.rollout.chats import parse_messages, parse_tools, with_system
from managed_cli.rollout.input_options import DEFAULT_ID_FIELD, InputOptions
from managed_cli.rollout.jsonl import fault, keys_shown, quoted, shown
from managed_cli.rollout.overrides import parse_overrides
from managed_cli.rollout.responses_items import messages_of_items
from managed_cli.rollout.token_ids import parse_text_or_ids

BATCH_ID_FIELD = "custom_id"

BATCH_ENDPOINTS = ("/chat/completions", "/completions", "/responses")
"""How the `url` of a batch line may end; other endpoints sample nothing."""

RESPONSES_FIELD = "responses_create_params"

_SENT = {
    **{name: name for name in ("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "max_tokens"),
    "stop_token_ids": "stop_token_ids",
}
"""Parameter of a request (vLLM's and SGLang's additions too) → ours."""

_NOT_SENT: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto", "none"),
    "truncation": ("disabled",),
    "modalities": (["text"],),
    "min_tokens": (0,),
    "best_of": (1,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    **dict.fromkeys(
        (
            *("functions", "function_call", "suffix", "audio", "web_search_options", "bad_words", "allowed_token_ids"),
            *("reasoning", "reasoning_effort", "verbosity", "enable_thinking", "thinking"),
            *("chat_template", "chat_template_kwargs", "documents", "prompt_embeds", "truncate_prompt_tokens"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
            *("logits_processors", "previous_response_id", "conversation"),
        ),
        (),
    ),
}
"""Parameters that change what is sampled and are not sent → values that are the same as leaving them out."""


def is_batch_line(record: Mapping[str, object]) -> bool:
    """Whether `record` is a request of a batch file."""
    return isinstance(record.get("body"), dict) and record.get(BATCH_ID_FIELD) is not None


def parse_batch_line(record: dict[str, object], options: InputOptions) -> dict[str, Any]:  # Any: one type per key
    """What a batch line asks to be sent; `record` keeps what is not, the rest of `body` included.

    Raises:
        InputError: another endpoint, or a request that cannot be sent as it is meant.
    """
    if options.id_field in (DEFAULT_ID_FIELD, BATCH_ID_FIELD):
        record.pop(BATCH_ID_FIELD, None)
    method, url = record.get("method"), record.get("url")
    if method is not None and method != "POST":
        raise fault("method", "POST", method)
    if url is not None and not (isinstance(url, str) and url.rstrip("/").endswith(BATCH_ENDPOINTS)):
        raise fault("url", f"an endpoint that ends with {', '.join(BATCH_ENDPOINTS)}", url)
    return _parse_request(record, "body", options)


def parse_nemo_gym_line(record: dict[str, object], options: InputOptions) -> dict[str, Any]:  # Any: one type per key
    """What a NeMo-Gym line asks to be sent; `record` keeps what is not.

    Raises:
        InputError: a request that cannot be sent as it is meant.
    """
    return _parse_request(record, RESPONSES_FIELD, options)


def _parse_request(record: dict[str, object], place: str, options: InputOptions) -> dict[str, Any]:  # Any: as above
    if record.get("sampling") is not None:
        raise InputError(f"`sampling`: has no meaning beside `{place}`, expected its parameters inside")
    request = record.pop(place, None)
    if not isinstance(request, dict):
        raise fault(place, "an object with the parameters of a request", request)
    content = _content(request, place, options)
    _refuse_what_is_not_sent(request, place, content)
    if overrides := _take_overrides(request, place, options):
        content["sampling"] = overrides
    if request:
        record[place] = request
    return content


def _content(request: dict[str, object], place: str, options: InputOptions) -> dict[str, Any]:  # Any: as above
    given = [name for name in ("messages", "prompt", "input") if request.get(name) is not None]
    if len(given) != 1:
        came = " and ".join(f"`{name}`" for name in given) or (f"{keys_shown(request)}" if request else "nothing")
        raise InputError(f"`{place}`: expected exactly one of `messages`, `prompt` and `input`, came {came}")
    value, tools = request.pop(given[0]), request.pop("tools", None)
    if given[0] == "prompt":
        if tools:
            raise InputError(f"`{place}.tools`: belongs to a chat, and this request has a text prompt")
        return parse_text_or_ids(f"{place}.prompt", value)
    instructions = request.pop("instructions", None) if given[0] == "input" else None
    if given[0] == "input":
        value, tools = messages_of_items(f"{place}.input", value), _chat_tools(f"{place}.tools", tools)
    messages = parse_messages(value, f"{place}.{given[0]}")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise fault(f"{place}.instructions", "a string", instructions)
        messages = ({"role": "system", "content": instructions}, *messages)
    content: dict[str, Any] = {  # Any: as above
        "messages": messages if options.system is None else with_system(messages, options.system)
    }
    if tools is not None and (parsed := parse_tools(tools, f"{place}.tools")):
        content["tools"] = parsed
    return content


def _chat_tools(place: str, tools: object) -> object:
    """Responses' flat function tools in the form that chat templates read."""
    if not isinstance(tools, list):
        return tools
    return [_chat_tool(f"{place}[{index}]", tool) for index, tool in enumerate(tools)]


def _chat_tool(place: str, tool: object) -> object:
    if not isinstance(tool, dict) or "function" in tool:
        return tool
    if tool.get("type") != "function":
        raise fault(f"{place}.type", "function, since no other tool can be described to a model here", tool.get("type"))
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _refuse_what_is_not_sent(request: Mapping[str, object], place: str, content: Mapping[str, Any]) -> None:  # Any: …
    messages = content.get("messages")
    continues = messages is not None and messages[-1]["role"] == "assistant"
    as_it_happens: dict[str, tuple[object, ...]] = {
        "add_special_tokens": (messages is None,),
        "add_generation_prompt": (not continues,),
        "continue_final_message": (continues,),
    }
    for name, value in request.items():
        harmless = _NOT_SENT.get(name, as_it_happens.get(name))
        if harmless is None or _is_empty(value) or value in harmless:
            continue
        only = f"{' or '.join(shown(one) for one in harmless)}, or none" if harmless else "none"
        raise InputError(
            f"`{place}.{name}`: expected {only}, came {shown(value)}; "
            "it would change what is sampled, and is not sent to the server",
            hint=f"take {quoted(name)} out of the lines if it may be ignored",
        )


def _is_empty(value: object) -> bool:
    """Whether a parameter is as good as absent: null, or a container of nothing but nulls."""
    if isinstance(value, dict):
        return all(item is None for item in value.values())
    return value is None or value == [] or value == ""


def _take_overrides(request: dict[str, object], place: str, options: InputOptions) -> Mapping[str, object]:
    """The sampling parameters of a request, checked; they are taken out of it."""
    values: dict[str, object] = {}
    places = {"n": place}
    for name in [name for name in request if name in _SENT]:
        value, ours = request.pop(name), _SENT[name]
        if value is None:
            continue
        if ours in values and values[ours] != value:
            raise InputError(f"`{places[ours]}` and `{place}.{name}`: expected one of them, came two values")
        values[ours], places[ours] = value, f"{place}.{name}"
    return parse_overrides(values, options.sampling, places) if values else {}
