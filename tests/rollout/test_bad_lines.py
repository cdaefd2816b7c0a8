from __future__ import annotations

import pytest

from managed_cli.errors import ExitCode, InputError
from managed_cli.rollout.inputs import MAX_LINE_BYTES
from managed_cli.rollout.tasks import InputOptions, read_tasks
from tests.rollout.inputs_on_disk import WriteInput, fault_of_line, refusal

USER = {"role": "user", "content": "hi"}


def assistant(content: object) -> dict[str, object]:
    return {"role": "assistant", "content": content}


def part(**fields: object) -> dict[str, object]:
    return {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, fields]}]}


NO_OBJECT = {
    b"[1]": "expected a JSON object, came a list of 1",
    b'"text"': 'expected a JSON object, came the string "text"',
    b"3": "expected a JSON object, came the number 3",
    b"null": "expected a JSON object, came null",
    b"true": "expected a JSON object, came true",
}

INVALID_JSON = {
    b'{"prompt": "a"': "invalid JSON at column 15: expecting ',' delimiter",
    b'{"prompt": "a': "invalid JSON at column 12: unterminated string",
    b'{"prompt": "a"} x': "invalid JSON at column 17: extra data",
    b"{'prompt': 'a'}": "invalid JSON at column 2: expecting property name enclosed in double quotes",
    '{"prompt": "ü" "b"}'.encode(): "invalid JSON at column 16: expecting ',' delimiter",
    b'{"prompt": "a\tb"}': "invalid JSON at column 14: invalid control character",
    b'{"prompt": "NaN", "x": NaN}': "invalid JSON at column 24: NaN is no JSON value",
    b'{"prompt": "\\"", "x": [-Infinity]}': "invalid JSON at column 24: -Infinity is no JSON value",
    b'{"prompt": "a", "x": 1e999}': "invalid JSON: a number is out of range",
    b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}": "invalid JSON: a number is out of range",
    b'{"prompt": "\\ud800"}': "invalid JSON: a `\\u` escape is half of a surrogate pair",
    b'{"prompt": ' + b"[" * 100_000: "invalid JSON: nested too deeply to be read",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "invalid JSON: nested too deeply to be read",
}

BAD_FIELDS: list[tuple[dict[str, object], str]] = [
    ({}, "expected `prompt`, `messages` or `turns`, came an object without other fields"),
    ({"topic": 1, "id": 1}, "expected `prompt`, `messages` or `turns`, came an object with `topic`"),
    ({"prompt": None}, "expected `prompt`, `messages` or `turns`, came an object without other fields"),
    ({"prompt": ""}, "`prompt`: expected a non-empty string, came an empty string"),
    ({"prompt": 42}, "`prompt`: expected a non-empty string, came the number 42"),
    ({"prompt": []}, "`prompt`: expected text, a list of messages or a list of token ids, came an empty list"),
    ({"prompt": ["a"]}, "`prompt`: expected text, a list of messages or a list of token ids, came a list of 1"),
    ({"prompt": "a", "messages": [USER]}, "`prompt` and `messages`: expected exactly one of them, came 2"),
    ({"prompt": "a", "turns": ["b"]}, "`prompt` and `turns`: expected exactly one of them, came 2"),
    ({"messages": [USER], "turns": ["b"]}, "`messages` and `turns`: expected exactly one of them, came 2"),
    (
        {"prompt": "a", "messages": [USER], "turns": ["b"]},
        "`prompt` and `messages` and `turns`: expected exactly one of them, came 3",
    ),
    ({"prompt": "a", "system": "b"}, "`system`: belongs to a chat, and this line has a text prompt in `prompt`"),
    ({"prompt": "a", "tools": [{}]}, "`tools`: belongs to a chat, and this line has a text prompt in `prompt`"),
    ({"prompt": "a", "id": 1.5}, "`id`: expected an id, a non-empty string or an integer, came the number 1.5"),
    ({"prompt": "a", "id": ""}, "`id`: expected an id, a non-empty string or an integer, came an empty string"),
    ({"prompt": "a", "id": True}, "`id`: expected an id, a non-empty string or an integer, came true"),
    ({"prompt": "a", "id": ["x"]}, "`id`: expected an id, a non-empty string or an integer, came a list of 1"),
    ({"messages": {}}, "`messages`: expected a list of messages, came an empty object"),
    ({"messages": "hi"}, '`messages`: expected a list of messages, came the string "hi"'),
    ({"messages": []}, "`messages`: expected a list of messages, came an empty list"),
    ({"messages": [USER, "x"]}, '`messages[1]`: expected an object with `role` and `content`, came the string "x"'),
    ({"messages": [{"content": "x"}]}, "`messages[0]`: expected `role` and `content`, `role` is missing"),
    ({"messages": [USER, {"role": "user"}]}, "`messages[1]`: expected `role` and `content`, `content` is missing"),
    (
        {"messages": [{"role": 3, "content": "x"}]},
        "`messages[0].role`: expected a role such as `user`, came the number 3",
    ),
    (
        {"messages": [{"role": "", "content": "x"}]},
        "`messages[0].role`: expected a role such as `user`, came an empty string",
    ),
    (
        {"messages": [{"role": "user", "content": None}]},
        "`messages[0].content`: expected a string or a list of text parts, came null",
    ),
    (
        {"messages": [{"role": "user", "content": []}]},
        "`messages[0].content`: expected a string or a list of text parts, came an empty list",
    ),
    (
        part(type="image_url", image_url={}),
        '`messages[1].content[1]`: expected a part of type "text", came type "image_url"',
    ),
    (part(text="x"), '`messages[1].content[1]`: expected a part of type "text", came type none'),
    (part(type="text"), "`messages[1].content[1].text`: expected a string, came null"),
    (
        {"messages": [{"role": "user", "content": ["x"]}]},
        '`messages[0].content[0]`: expected an object such as {"type": "text", "text": "…"}, came the string "x"',
    ),
    (
        {"messages": [USER, assistant(" \n")]},
        "`messages[1].content`: expected text, since an assistant message at the end is continued",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
        "`messages[1].content`: expected text, since an assistant message at the end is continued",
    ),
    (
        {"messages": [USER], "system": "x"},
        "`system`: stands beside `turns` only, expected it as the first of `messages`",
    ),
    ({"messages": [USER], "tools": {}}, "`tools`: expected a list of tool descriptions, came an empty object"),
    ({"messages": [USER], "tools": ["f"]}, '`tools[0]`: expected an object that describes a tool, came the string "f"'),
    ({"turns": "a"}, '`turns`: expected a list of user turns, came the string "a"'),
    ({"turns": []}, "`turns`: expected a list of user turns, came an empty list"),
    ({"turns": ["a", USER]}, "`turns[1]`: expected a non-empty string, came an object with `role`, `content`"),
    ({"turns": ["a", ""]}, "`turns[1]`: expected a non-empty string, came an empty string"),
    ({"turns": ["a"], "system": ["b"]}, "`system`: expected a string, came a list of 1"),
]


@pytest.mark.parametrize(("line", "message"), NO_OBJECT.items())
def test_a_line_that_is_no_object_is_told_by_what_it_is(write: WriteInput, line: bytes, message: str) -> None:
    assert fault_of_line(write({"prompt": "good"}, line)) == f"2: {message}"


@pytest.mark.parametrize(("line", "message"), INVALID_JSON.items(), ids=range(len(INVALID_JSON)))
def test_invalid_json_is_told_with_its_column(write: WriteInput, line: bytes, message: str) -> None:
    assert fault_of_line(write({"prompt": "good"}, line + b"\n")) == f"2: {message}"


@pytest.mark.parametrize(("record", "message"), BAD_FIELDS, ids=range(len(BAD_FIELDS)))
def test_a_bad_field_is_named_with_what_was_expected_and_what_came(
    write: WriteInput, record: dict[str, object], message: str
) -> None:
    assert fault_of_line(write({"prompt": "good"}, b"\n", record)) == f"3: {message}"


def test_invalid_utf8_is_told_with_its_byte(write: WriteInput) -> None:
    path = write({"prompt": "good"}, b'{"prompt": "\xc3\xa4\xe4"}\n')
    assert fault_of_line(path) == "2: invalid UTF-8: byte 15 of the line is 0xe4"


def test_a_file_in_utf16_gets_a_hint(write: WriteInput) -> None:
    error = refusal(write('{"prompt": "a"}\n'.encode("utf-16")))
    assert error.hint == "the file looks like UTF-16: `iconv -f UTF-16 -t UTF-8` converts it"


def test_a_json_array_gets_a_hint(write: WriteInput) -> None:
    hint = "`jq -c '.[]' FILE > prompts.jsonl` turns one JSON array into lines"
    assert refusal(write(b'[{"prompt": "a"}]\n')).hint == hint


def test_indented_json_gets_a_hint(write: WriteInput) -> None:
    hint = "each line must hold one whole object: `jq -c . FILE` (`.[]` for an array) writes it so"
    assert refusal(write(b'{\n  "prompt": "a"\n}\n')).hint == hint


@pytest.mark.parametrize("field", ["question", "instruction", "problem", "query", "input", "text"])
def test_a_line_with_its_prompt_elsewhere_gets_a_hint(write: WriteInput, field: str) -> None:
    error = refusal(write({"answer": "42", field: "what"}))
    assert error.hint == f"`--prompt-field {field}` takes the prompt from `{field}`"


def test_a_field_that_only_has_such_a_name_gets_no_hint(write: WriteInput) -> None:
    assert refusal(write({"input": 3})).hint is None


def test_a_missing_named_prompt_field_is_told_by_its_name(write: WriteInput) -> None:
    path = write({"question": "a"}, {"prompt": "b"})
    expected = "2: expected `question`, `messages` or `turns`, came an object with `prompt`"
    assert fault_of_line(path, prompt_field="question") == expected


def test_a_missing_named_id_is_a_fault(write: WriteInput) -> None:
    path = write({"prompt": "a", "uid": 1}, {"prompt": "b", "id": 2})
    assert fault_of_line(path, id_field="uid") == "2: `uid`: expected an id, the line has none"


def test_a_line_of_more_than_64_mib_is_refused_and_the_next_one_read(write: WriteInput) -> None:
    path = write(b'{"prompt": "' + b"a" * MAX_LINE_BYTES + b'"}\n', {"prompt": "good"}, {"prompt": 1})
    assert refusal(path).details == (
        f"{path}:1: expected at most 64 MiB in a line, came more",
        f"{path}:3: `prompt`: expected a non-empty string, came the number 1",
    )


def test_the_first_ten_bad_lines_are_listed_and_all_are_counted(write: WriteInput) -> None:
    path = write(*[{"prompt": i} for i in range(13)], {"prompt": "good"})
    error = refusal(path)
    assert error.message == f"13 of 14 samples in {path} cannot be used; no request was sent"
    assert [line.split(": `")[0] for line in error.details[:10]] == [f"{path}:{i}" for i in range(1, 11)]
    assert error.details[10:] == ("… and 3 more",)
    assert error.exit_code is ExitCode.INPUT


def test_every_repeat_of_an_id_is_a_bad_line(write: WriteInput) -> None:
    path = write(*[{"prompt": "a", "id": name} for name in "abab"])
    assert refusal(path).details == (
        f'{path}:3: `id`: expected an id of its own, came "a", as in line 1',
        f'{path}:4: `id`: expected an id of its own, came "b", as in line 2',
    )


def test_reading_stops_at_the_first_bad_line(write: WriteInput) -> None:
    path = write({"prompt": "a"}, {"prompt": 1}, {"prompt": 2})
    with pytest.raises(InputError) as caught:
        list(read_tasks(path, InputOptions()))
    assert caught.value.details == (f"{path}:2: `prompt`: expected a non-empty string, came the number 1",)


def test_text_from_the_input_cannot_steer_a_terminal(write: WriteInput) -> None:
    path = write({"id": "\x1b[31m", "prompt": "a"}, {"id": "\x1b[31m", "prompt": "a"}, {"\x9b2J\n": 1}, {"turns": "\a"})
    assert refusal(path).report().replace("\n", "").isprintable()


def test_a_long_string_is_shown_by_its_start(write: WriteInput) -> None:
    assert fault_of_line(write({"turns": "x" * 1000})).endswith(f'came the string "{"x" * 40}…"')


def test_many_keys_are_shown_by_the_first_six(write: WriteInput) -> None:
    path = write(dict.fromkeys("abcdefgh", 1))
    assert fault_of_line(path).endswith("came an object with `a`, `b`, `c`, `d`, `e`, `f`, …")
