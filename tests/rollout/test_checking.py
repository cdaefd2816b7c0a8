"""An input is checked the quick way where no ids seem to repeat; it finds what the slow way finds, and what is owed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_cli.errors import InputError
from managed_cli.rollout import tasks
from managed_cli.rollout.input_options import InputPart
from managed_cli.rollout.sample_ids import LateIds, SampleIds
from managed_cli.rollout.samples import LINES_AT_ONCE
from managed_cli.rollout.tasks import InputOptions, read_samples, validate_input
from managed_cli.storage.standing import SampleStanding
from managed_cli.types import SamplingParams
from tests.mutations import mutated
from tests.rollout.inputs_on_disk import WriteInput
from tests.rollout.test_mutated_lines import DOCUMENTS, GOOD_LINES

LINES = 400

OPTIONS: list[dict[str, object]] = [
    {},
    {"on_bad_line": "skip"},
    {"on_bad_line": "skip", "sampling": SamplingParams(n=4), "limit": 350},
    {"on_bad_line": "skip", "prompt_field": "question"},
    {"on_bad_line": "skip", "input_format": "prompt", "part": InputPart(2, 3)},
    {"on_bad_line": "skip", "input_format": "messages"},
    {"on_bad_line": "skip", "id_field": "uid"},
    {"on_bad_line": "skip", "id_field": "custom_id"},
]

WITH_SYSTEM: list[dict[str, object]] = [{"system": "Be brief."}, {"system": "Be brief.", "on_bad_line": "skip"}]


class CountedLooks(LateIds):
    """As `LateIds`; counts how often they were enough, and how often not."""

    answers: list[bool] = []  # noqa: RUF012 (emptied by each test)

    def all_differ(self) -> bool:
        answer = super().all_differ()
        self.answers.append(answer)
        return answer


class NeverEnough(LateIds):
    """Leaves everything to the slow way."""

    def all_differ(self) -> bool:
        return False


def outcome(path: Path, options: InputOptions) -> str:
    """The report or the refusal, in words."""
    try:
        return repr(validate_input(path, options))
    except InputError as error:
        return error.report()


def mixed_lines(chance: random.Random, *, damaged: float) -> bytes:
    """Lines of all kinds, hardly any of which has the id of another."""
    lines = [json.dumps(document).encode() for document in GOOD_LINES]
    for number in range(LINES):
        ids = [f"line {number}", number, f"{number:016x}-0"]
        document = dict(chance.choice(DOCUMENTS))
        for key in ("id", "custom_id"):
            if key in document:
                document[key] = chance.choice(ids)
        document["uid"] = f"u{number}"
        if chance.random() < 0.3:
            document.pop("id", None)
        line = mutated(document, chance) if chance.random() < damaged else json.dumps(document).encode()
        lines.append(line.replace(b"\n", b" "))
    return b"\n".join(lines)


@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda chosen: " ".join(map(str, chosen.values())))
@pytest.mark.parametrize("damaged", [0.0, 0.3])
def test_the_quick_way_finds_what_the_slow_way_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, object], damaged: float
) -> None:
    options = InputOptions(**chosen)  # type: ignore[arg-type]  # options by name
    path = tmp_path / "mixed.jsonl"
    CountedLooks.answers.clear()
    for number in range(4):
        path.write_bytes(mixed_lines(random.Random(f"{number} {damaged}"), damaged=damaged))
        monkeypatch.setattr(tasks, "LateIds", CountedLooks)
        quick = outcome(path, options)
        monkeypatch.setattr(tasks, "LateIds", NeverEnough)
        assert quick == outcome(path, options)
    assert any(CountedLooks.answers), "the quick way was never enough, so nothing was compared"


@pytest.mark.parametrize("on_bad_line", ["fail", "skip"])
def test_ids_that_repeat_are_found_after_the_quick_way(
    write: WriteInput, monkeypatch: pytest.MonkeyPatch, on_bad_line: str
) -> None:
    path = write(*[{"id": f"s{number % 9}", "prompt": f"Count to {number}."} for number in range(12)])
    monkeypatch.setattr(tasks, "LateIds", CountedLooks)
    CountedLooks.answers.clear()
    found = outcome(path, InputOptions(on_bad_line=on_bad_line))  # type: ignore[arg-type]  # one of two words
    assert CountedLooks.answers == [False]
    if on_bad_line == "skip":
        assert "samples=12, " in found
        assert "bad_lines=3, " in found
    else:
        assert "3 of 12 samples" in found
        assert f"{path}:10: `id`: expected an id of its own" in found


derived = st.sampled_from([b"a", b"b", b"c"])
given_ids = st.one_of(
    st.sampled_from([SampleIds().derive(content)[:-1] + str(number) for content in (b"a", b"b") for number in (0, 1)]),
    st.text(min_size=1, max_size=2),
)


@given(st.lists(st.one_of(st.tuples(st.just("derive"), derived), st.tuples(st.just("give"), given_ids)), max_size=12))
def test_late_ids_differ_exactly_where_none_would_have_been_refused(steps: list[tuple[str, object]]) -> None:
    at_once, late = SampleIds(), LateIds()
    refused = False
    for how, value in steps:
        if isinstance(value, bytes):
            assert how == "derive"
            sample_id = at_once.derive(value)
            assert late.derive(value) == sample_id
            refused |= at_once.is_taken_as_given(sample_id)
            assert not late.is_taken_as_given(sample_id)
        else:
            refused |= not at_once.give(str(value))
            assert late.give(str(value))
    assert late.all_differ() is not refused


def standings_of(recorded: set[str], failed: set[str], asked: list[int]) -> tasks.Standings:
    """Of samples in these sets; `asked` gets how many were looked up together."""

    def standings(sample_ids: Sequence[str]) -> list[SampleStanding]:
        asked.append(len(sample_ids))
        return [
            SampleStanding.RECORDED
            if sample_id in recorded
            else SampleStanding.FAILED
            if sample_id in failed
            else SampleStanding.OWED
            for sample_id in sample_ids
        ]

    return standings


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("on_bad_line", ["fail", "skip"])
def test_what_earlier_sessions_have_settled_is_counted_until_one_is_owed(
    write: WriteInput, with_ids: bool, on_bad_line: str
) -> None:
    count = 3 * LINES_AT_ONCE + 7
    records: list[object] = [
        {"prompt": f"Count to {number % 1000}.", **({"id": f"s{number}"} if with_ids else {})}
        for number in range(count)
    ]
    if on_bad_line == "skip":
        records.append({"id": "bad"})
    path = write(*records)
    options = InputOptions(on_bad_line=on_bad_line)  # type: ignore[arg-type]  # one of two words
    ids = [sample.sample_id for sample in read_samples(path, options)]
    failed, asked = {*ids[5:25], *ids[count:]}, list[int]()
    report = validate_input(path, options, standings_of(set(ids) - failed, failed, asked))
    assert (report.recorded_earlier, report.failed_earlier) == (len(ids) - len(failed), len(failed))
    assert report.owes_nothing
    assert sum(asked) == len(ids)
    assert report.fingerprint == validate_input(path, options).fingerprint

    asked.clear()
    owed = validate_input(path, options, standings_of(set(ids) - failed - {ids[LINES_AT_ONCE]}, failed, asked))
    assert (owed.recorded_earlier, owed.failed_earlier, owed.owes_nothing) == (0, 0, False)
    assert sum(asked) == 2 * LINES_AT_ONCE, "what follows the first owed sample was looked up for nothing"


def test_what_is_settled_of_a_part_is_counted_in_that_part_alone(write: WriteInput) -> None:
    path = write(*[{"id": f"s{number}", "prompt": "Hi."} for number in range(60)])
    part = InputOptions(part=InputPart(1, 2))
    ids = {sample.sample_id for sample in read_samples(path, part)}
    assert 10 < len(ids) < 50
    report = validate_input(path, part, standings_of(ids, set(), []))
    assert report.owes_nothing
    assert (report.samples, report.recorded_earlier) == (len(ids), len(ids))


def test_without_an_output_everything_is_owed(write: WriteInput) -> None:
    assert not validate_input(write({"prompt": "Hi."}), InputOptions()).owes_nothing


@pytest.mark.parametrize("chosen", WITH_SYSTEM)
def test_a_repeated_id_is_told_before_a_system_message_without_a_place(
    write: WriteInput, chosen: dict[str, object]
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi."}]}
    path = write({"id": "a", **chat}, {"id": "a", "prompt": "Hi."}, {"id": "b", **chat})
    found = outcome(path, InputOptions(**chosen))  # type: ignore[arg-type]  # options by name
    assert ("bad_lines=1," if "on_bad_line" in chosen else "1 of 3 samples") in found
