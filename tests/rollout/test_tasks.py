from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_cli.errors import ConfigError, InputError
from managed_cli.rollout import sample_ids
from managed_cli.rollout.samples import CHAT_FIELDS
from managed_cli.rollout.tasks import InputOptions, read_tasks, validate_input
from managed_cli.types import SamplingParams
from tests.rollout.inputs_on_disk import WriteInput, fault_of_line, json_lines, refusal, tasks_of

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


def test_a_text_prompt_is_kept_to_the_last_space(write: WriteInput) -> None:
    (task,) = tasks_of(write({"prompt": " two  \n", "id": "a"}))
    assert (task.prompt, task.messages, task.turns, task.sample_id) == (" two  \n", None, None, "a")


def test_a_task_names_its_file_and_physical_line(write: WriteInput) -> None:
    tasks = tasks_of(write(b"\n", {"prompt": "a"}, b"  \r\n", {"prompt": "b"}))
    assert [(task.source, task.line) for task in tasks] == [("prompts.jsonl:2", 2), ("prompts.jsonl:4", 4)]


def test_a_byte_order_mark_crlf_and_a_missing_last_newline_do_no_harm(write: WriteInput) -> None:
    path = write(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert [(task.prompt, task.line) for task in tasks_of(path)] == [("a", 1), ("b", 3)]


def test_all_other_fields_are_kept(write: WriteInput) -> None:
    (task,) = tasks_of(write({"prompt": "a", "topic": "x", "id": 1, "sampling": {"n": 2}, "extra": {"deep": [None]}}))
    assert task.fields == {"topic": "x", "extra": {"deep": [None]}}


def test_the_prompt_field_can_be_named_and_prompt_is_then_an_ordinary_field(write: WriteInput) -> None:
    (task,) = tasks_of(write({"question": "q", "prompt": "p"}), prompt_field="question")
    assert (task.prompt, task.fields) == ("q", {"prompt": "p"})


def test_null_is_the_same_as_absent(write: WriteInput) -> None:
    line = {"prompt": None, "messages": [USER], "turns": None, "tools": None, "sampling": None, "id": None}
    (task,) = tasks_of(write(line))
    assert task.messages == (USER,)
    assert task.fields == {}


def test_messages_are_kept_with_everything_a_template_may_read(write: WriteInput) -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "now"}],
            "name": "Kim",
        },
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    (task,) = tasks_of(write({"messages": messages, "tools": tools}))
    assert (task.messages, task.tools) == (tuple(messages), tuple(tools))
    assert not task.continue_final


def test_an_assistant_message_at_the_end_is_continued(write: WriteInput) -> None:
    (task,) = tasks_of(write({"messages": [USER, {"role": "assistant", "content": "Once"}]}))
    assert task.continue_final


def test_a_text_prompt_is_never_a_continued_chat(write: WriteInput) -> None:
    (task,) = tasks_of(write({"prompt": "a"}))
    assert not task.continue_final


def test_turns_come_with_their_own_system_message(write: WriteInput) -> None:
    (task,) = tasks_of(write({"turns": ["a", "b"], "system": "brief"}), system="long")
    assert (task.turns, task.system) == (("a", "b"), "brief")


def test_the_run_s_system_message_goes_where_there_is_none(write: WriteInput) -> None:
    developer = {"role": "developer", "content": "x"}
    path = write({"messages": [USER]}, {"messages": [SYSTEM, USER]}, {"messages": [developer, USER]}, {"turns": ["a"]})
    first, second, third, fourth = tasks_of(path, system="be kind")
    assert first.messages == ({"role": "system", "content": "be kind"}, USER)
    assert second.messages == (SYSTEM, USER)
    assert third.messages == (developer, USER)
    assert fourth.system == "be kind"


def test_the_run_s_system_message_with_a_text_prompt_names_the_first_such_line(write: WriteInput) -> None:
    path = write({"messages": [USER]}, {"prompt": "a"}, {"prompt": "b"})
    error = refusal(path, system="be kind")
    assert error.message == f"{path}:2: --system applies to chats only, and this line is a text prompt"
    assert error.details == ("no request was sent",)
    with pytest.raises(InputError, match=":2: --system applies to chats only"):
        list(read_tasks(path, InputOptions(system="be kind")))


def test_empty_tools_are_no_tools(write: WriteInput) -> None:
    path = write({"messages": [USER], "tools": []}, {"prompt": "a", "tools": []})
    assert [task.tools for task in tasks_of(path)] == [None, None]


def test_sampling_of_a_line_goes_over_the_run_s(write: WriteInput) -> None:
    (task, plain) = tasks_of(write({"prompt": "a", "sampling": {"n": 3, "stop": "x", "top_p": None}}, {"prompt": "b"}))
    run = SamplingParams(n=1, top_p=0.5, max_tokens=9)
    assert task.sampling(run) == SamplingParams(n=3, top_p=0.5, max_tokens=9, stop=("x",))
    assert plain.sampling(run) is run


def test_the_report_counts_samples_and_the_choices_they_will_have(write: WriteInput) -> None:
    report = validate_input(
        write({"prompt": "a"}, {"messages": [USER]}, {"turns": ["a"], "sampling": {"n": 5}}), InputOptions()
    )
    assert (report.samples, report.text_prompts, report.chats, report.turn_lists) == (3, 1, 1, 1)
    assert report.choices(run_n=2) == 2 + 2 + 5


def test_a_limit_uses_the_first_samples_and_checks_no_others(write: WriteInput) -> None:
    path = write({"prompt": "a"}, b"\n", {"prompt": "b"}, b"not json\n")
    assert [task.prompt for task in tasks_of(path, limit=2)] == ["a", "b"]
    assert refusal(path, limit=3).message == f"1 of 3 samples in {path} cannot be used; no request was sent"


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS))
def test_fields_with_a_meaning_cannot_hold_the_prompt_or_the_id(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--prompt-field {name}: "):
        InputOptions(prompt_field=name)
    with pytest.raises(ConfigError, match=f"--id-field {name}: "):
        InputOptions(id_field=name)


def test_one_field_cannot_be_prompt_and_id() -> None:
    with pytest.raises(ConfigError, match="--id-field prompt: expected another field"):
        InputOptions(id_field="prompt")


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--limit 0: expected at least 1"):
        InputOptions(limit=0)


# Identity


def test_an_integer_id_is_its_digits(write: WriteInput) -> None:
    assert [task.sample_id for task in tasks_of(write({"prompt": "a", "id": 7}))] == ["7"]


def test_the_id_field_can_be_named(write: WriteInput) -> None:
    (task,) = tasks_of(write({"prompt": "a", "uid": "u", "id": "i"}), id_field="uid")
    assert (task.sample_id, task.fields) == ("u", {"id": "i"})


def test_derived_ids_count_equal_contents(write: WriteInput) -> None:
    ids = [task.sample_id for task in tasks_of(write({"prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "topic": 1}))]
    assert ids[0].endswith("-0")
    assert ids[2] == ids[0].removesuffix("0") + "1"
    assert ids[1] not in (ids[0], ids[2])


def test_a_derived_id_is_the_same_on_every_machine_and_in_every_version(write: WriteInput) -> None:
    # sha256 of {"prompt":"a"}, computed with sha256sum: a change here makes finished runs impossible to resume
    assert [task.sample_id for task in tasks_of(write({"prompt": "a"}))] == ["732acbb3e402e912-0"]


def test_everything_that_is_sent_is_part_of_a_derived_id(write: WriteInput) -> None:
    records: list[object] = [
        {"prompt": "a"},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [SYSTEM, {"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]},
        {"turns": ["a"]},
        {"turns": ["a"], "system": "s"},
        {"prompt": "a", "sampling": {"n": 2}},
    ]
    ids = {task.sample_id for task in tasks_of(write(*records))}
    assert len(ids) == len(records)
    assert all(sample_id.endswith("-0") for sample_id in ids)


def test_spelling_is_no_part_of_a_derived_id(write: WriteInput) -> None:
    path = write(
        b'{"prompt": "\\u00e9", "sampling": {"temperature": 1, "stop": "x"}}\n',
        '{"sampling":{"stop":["x"],"temperature":1.0,"n":null},"prompt":"é"}\n'.encode(),
    )
    first, second = tasks_of(path)
    assert second.sample_id == first.sample_id.removesuffix("0") + "1"


def test_a_repeated_id_names_both_lines(write: WriteInput) -> None:
    path = write({"prompt": "a", "id": 1}, {"prompt": "b"}, {"prompt": "c", "id": "1"})
    assert fault_of_line(path) == '3: `id`: expected an id of its own, came "1", as in line 1'


@pytest.mark.parametrize("given_first", [True, False])
def test_an_id_that_another_line_derives_is_a_repeated_id(write: WriteInput, given_first: bool) -> None:
    (derived,) = (task.sample_id for task in tasks_of(write({"prompt": "a"})))
    lines: list[object] = [{"prompt": "b", "id": derived}, {"prompt": "a"}]
    path = write(*(lines if given_first else lines[::-1]))
    assert fault_of_line(path) == f'2: `id`: expected an id of its own, came "{derived}", as in line 1'


def test_an_id_that_only_looks_derived_is_free(write: WriteInput) -> None:
    (derived,) = (task.sample_id for task in tasks_of(write({"prompt": "a"})))
    path = write({"prompt": "a"}, {"prompt": "b", "id": derived.removesuffix("0") + "1"}, {"prompt": "c", "id": "0-0"})
    assert len(tasks_of(path)) == 3


def test_ids_whose_hashes_meet_are_not_taken_for_one(write: WriteInput, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"})
    monkeypatch.setattr(sample_ids, "hash", lambda _: 0, raising=False)
    assert [task.sample_id for task in tasks_of(path)] == ["x", "y"]
    assert validate_input(path, InputOptions()).samples == 2


# Properties; they write files, so a busy disk must not look like a slow example

texts = st.text(min_size=1, max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)
other_fields = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in CHAT_FIELDS | {"prompt", "id"}), json_values, max_size=3
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": st.text(max_size=20)}),
    min_size=1,
    max_size=4,
)
contents = (
    texts.map(lambda text: {"prompt": text})
    | messages.map(lambda chat: {"messages": chat})
    | st.lists(texts, min_size=1, max_size=3).map(lambda turns: {"turns": turns})
)
records = st.builds(lambda content, fields: {**fields, **content}, contents, other_fields)


@settings(deadline=None)
@given(
    lines=st.lists(st.tuples(records, st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n"])), min_size=1, max_size=8)
)
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, lines: list) -> None:
    path = tmp_path_factory.getbasetemp() / "written.jsonl"
    text = "".join(json.dumps(record, ensure_ascii=ascii_only) + end for record, ascii_only, end in lines)
    path.write_bytes(text.encode())
    for task, (record, _, _) in zip(tasks_of(path), lines, strict=True):
        kept = {name: value for name, value in record.items() if name not in ("prompt", "messages", "turns")}
        assert task.prompt == record.get("prompt")
        assert task.messages == (tuple(record["messages"]) if "messages" in record else None)
        assert task.turns == (tuple(record["turns"]) if "turns" in record else None)
        assert task.fields == kept


@settings(deadline=None)
@given(data=st.data(), lines=st.lists(contents, min_size=1, max_size=8))
def test_identity_and_fingerprint_do_not_depend_on_the_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, lines: list
) -> None:
    path = tmp_path_factory.getbasetemp() / "ordered.jsonl"

    def sent(records: list) -> tuple[dict, str]:
        path.write_bytes(json_lines(records))
        by_id = {task.sample_id: (task.prompt, task.messages, task.turns) for task in tasks_of(path)}
        assert len(by_id) == len(records)
        return by_id, validate_input(path, InputOptions()).fingerprint

    assert sent(lines) == sent(data.draw(st.permutations(lines)))


@settings(max_examples=30, deadline=None)
@given(first=texts, second=texts)
def test_the_fingerprint_tells_what_is_sent_under_a_given_id(
    tmp_path_factory: pytest.TempPathFactory, first: str, second: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fingerprint.jsonl"

    def fingerprint(**record: object) -> str:
        path.write_bytes(json_lines([{"id": "a", **record}]))
        return validate_input(path, InputOptions()).fingerprint

    assert (fingerprint(prompt=first) == fingerprint(prompt=second)) == (first == second)
    assert fingerprint(prompt=first) == fingerprint(prompt=first, topic="other")
    assert fingerprint(prompt=first) != fingerprint(prompt=first, id="b")


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    lines, line_bytes, bound_bytes = 20_000, 2_000, 8 * 2**20
    path = tmp_path / "large.jsonl"
    path.write_bytes(json_lines({"prompt": f"{i}" + "x" * line_bytes, "id": f"s{i}"} for i in range(lines)))
    assert path.stat().st_size > 4 * bound_bytes
    tracemalloc.start()
    try:
        assert validate_input(path, InputOptions()).samples == lines
        assert sum(1 for _ in read_tasks(path, InputOptions())) == lines
        assert tracemalloc.get_traced_memory()[1] < bound_bytes
    finally:
        tracemalloc.stop()


def test_reading_hands_out_tasks_before_it_has_seen_the_end(write: WriteInput) -> None:
    path = write({"prompt": "a"}, {"prompt": "b"}, b"not json\n")
    assert [task.prompt for task in itertools.islice(read_tasks(path, InputOptions()), 2)] == ["a", "b"]
