from __future__ import annotations

import pytest

from managed_cli.rollout.overrides import parse_overrides
from managed_cli.rollout.tasks import InputOptions, validate_input
from managed_cli.types import SamplingParams
from tests.rollout.inputs_on_disk import WriteInput, fault_of_line

COUNT = "an integer from 1 to 2147483647"
TOKEN_IDS = "a list of integers from 0 to 2147483647"
STOP = "a non-empty string or a list of them"

REFUSED: list[tuple[str, object, str, str]] = [
    ("n", 0, COUNT, "the number 0"),
    ("n", 2.0, COUNT, "the number 2.0"),
    ("n", True, COUNT, "true"),
    ("n", 2**31, COUNT, "the number 2147483648"),
    ("max_tokens", 0, COUNT, "the number 0"),
    ("max_tokens", "64", COUNT, 'the string "64"'),
    ("temperature", -0.1, "a number of at least 0", "the number -0.1"),
    ("temperature", False, "a number of at least 0", "false"),
    ("temperature", "hot", "a number of at least 0", 'the string "hot"'),
    ("temperature", 10**400, "a number of at least 0", f"the number 1{'0' * 39}…"),
    ("top_p", 0, "a number above 0 and at most 1", "the number 0"),
    ("top_p", 1.01, "a number above 0 and at most 1", "the number 1.01"),
    ("top_k", -2, "-1 (off) or an integer from 1", "the number -2"),
    ("top_k", 2.5, "-1 (off) or an integer from 1", "the number 2.5"),
    ("min_p", -0.1, "a number from 0 to 1", "the number -0.1"),
    ("min_p", 1.1, "a number from 0 to 1", "the number 1.1"),
    ("repetition_penalty", 0, "a number above 0", "the number 0"),
    ("seed", -1, f"an integer from 0 to {2**63 - 1}", "the number -1"),
    ("seed", 2**63, f"an integer from 0 to {2**63 - 1}", f"the number {2**63}"),
    ("stop", "", STOP, "an empty string"),
    ("stop", ["a", ""], STOP, "a list of 2"),
    ("stop", 3, STOP, "the number 3"),
    ("stop_token_ids", 3, TOKEN_IDS, "the number 3"),
    ("stop_token_ids", [-1], TOKEN_IDS, "a list of 1"),
    ("stop_token_ids", [True], TOKEN_IDS, "a list of 1"),
]

KEPT: list[tuple[str, object, object]] = [
    ("n", 4, 4),
    ("max_tokens", 1, 1),
    ("temperature", 0, 0.0),
    ("temperature", 2, 2.0),
    ("top_p", 1, 1.0),
    ("top_k", -1, -1),
    ("top_k", 0, -1),
    ("top_k", 20, 20),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("repetition_penalty", 1.1, 1.1),
    ("seed", 0, 0),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("stop", "\n", ("\n",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", [], ()),
    ("stop_token_ids", [0, 2], (0, 2)),
]


@pytest.mark.parametrize(("name", "value", "expected", "came"), REFUSED)
def test_a_value_out_of_range_is_refused(write: WriteInput, name: str, value: object, expected: str, came: str) -> None:
    path = write({"prompt": "a", "sampling": {name: value}})
    assert fault_of_line(path) == f"1: `sampling.{name}`: expected {expected}, came {came}"


@pytest.mark.parametrize(("name", "given", "kept"), KEPT)
def test_a_value_is_kept_in_the_form_it_is_sent_in(name: str, given: object, kept: object) -> None:
    value = parse_overrides({name: given}, None)[name]
    assert (value, type(value)) == (kept, type(kept))


def test_every_sampling_parameter_can_be_set_by_a_line() -> None:
    names = set(SamplingParams.__struct_fields__)
    assert names == {name for name, _, _ in KEPT}


def test_null_leaves_a_parameter_to_the_run() -> None:
    assert parse_overrides({"n": None, "top_p": 0.5}, None) == {"top_p": 0.5}


@pytest.mark.parametrize("value", [[], "n=2", 3])
def test_sampling_that_is_no_object_is_refused(write: WriteInput, value: object) -> None:
    fault = fault_of_line(write({"prompt": "a", "sampling": value}))
    assert fault.startswith("1: `sampling`: expected an object of sampling parameters, came ")


@pytest.mark.parametrize(
    ("name", "near"),
    [("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("topp", "top_p"), ("stops", "stop")],
)
def test_an_unknown_name_brings_the_nearest_one(write: WriteInput, name: str, near: str) -> None:
    path = write({"prompt": "a", "sampling": {name: 1}})
    assert fault_of_line(path) == f'1: `sampling`: "{name}" is no sampling parameter, did you mean `{near}`?'


def test_an_unknown_name_with_no_near_one_brings_them_all(write: WriteInput) -> None:
    expected = (
        '1: `sampling`: "beam" is no sampling parameter, expected n, max_tokens, temperature, top_p, top_k, min_p, '
        "repetition_penalty, seed, stop, stop_token_ids"
    )
    assert fault_of_line(write({"prompt": "a", "sampling": {"beam": 4}})) == expected


@pytest.mark.parametrize(
    ("line", "run"),
    [
        ({"n": 2, "temperature": 0}, None),
        ({"temperature": 0.0}, SamplingParams(n=2)),
        ({"n": 2}, SamplingParams(temperature=0)),
    ],
)
def test_several_greedy_choices_are_refused(
    write: WriteInput, line: dict[str, object], run: SamplingParams | None
) -> None:
    fault = fault_of_line(write({"prompt": "a", "sampling": line}), sampling=run)
    assert fault == "1: `sampling`: expected n = 1 at temperature 0, came n = 2"


def test_a_line_can_be_greedy_in_a_run_of_several_choices(write: WriteInput) -> None:
    path = write({"prompt": "a", "sampling": {"n": 1, "temperature": 0}})
    assert validate_input(path, InputOptions(sampling=SamplingParams(n=8))).choices(run_n=8) == 1
