"""Damage of many kinds, each planted in one row of an honest recording: each is found, and named where it can be."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers

from tests.cli.rollout_command import at
from tests.scoring.recordings import (
    DAMAGED_ROW,
    Row,
    counted,
    damaged,
    put,
    record,
    report,
    rows_at,
    sampled,
    verify_here,
)
from tests.servers.process import RunningServer, running_server
from tests.servers.tokenizer import shared_tokenizer_directory

Damage = Callable[[list[Row], Row], None]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("vllm") as started:
        yield started


@pytest.fixture(scope="module")
def honest(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(server, tmp_path_factory.mktemp("honest"))


def values(change: Callable[[list[float]], list[float]]) -> Damage:
    """Damage to the logprobs of the sampled positions, which leaves their number as it is."""

    def damage(_: list[Row], row: Row) -> None:
        places = sampled(row)
        for place, value in zip(places, change([row["logprobs"][p] for p in places]), strict=True):
            row["logprobs"][place] = value
        counted(row)

    return damage


def another_choice(rows: list[Row], row: Row) -> None:
    """The logprobs of the sample's other choice, as far as they go."""
    other = next(r for r in rows if r["sample_id"] == row["sample_id"] and r is not row)
    theirs = [other["logprobs"][place] for place in sampled(other)]
    own = sampled(row)
    for place, value in zip(own, theirs, strict=False):
        row["logprobs"][place] = value
    if len(own) > len(theirs):
        del row["tokens"][own[len(theirs)] :], row["masked_tokens"][own[len(theirs)] :]
        del row["logprobs"][own[len(theirs)] :]
        row["metadata"]["turns"][-1]["end"] = len(row["tokens"])
    counted(row)


def swapped_tokens(_: list[Row], row: Row) -> None:
    first = next(p for p in sampled(row)[3:] if row["tokens"][p] != row["tokens"][p + 1])
    one, other = row["tokens"][first : first + 2]
    put(row, first, other)
    put(row, first + 1, one)


def changed_token(_: list[Row], row: Row) -> None:
    place = sampled(row)[len(sampled(row)) // 2]
    put(row, place, row["tokens"][place] + 1)


def doubled_end(_: list[Row], row: Row) -> None:
    """What a template writes behind a sampled end-of-turn token that is there already."""
    row["tokens"].append(row["tokens"][-1])
    row["masked_tokens"].append(-100)
    row["logprobs"].append(1.0)
    row["full_text"] += "<|im_end|>"
    counted(row)


def changed_prompt(_: list[Row], row: Row) -> None:
    put(row, 1, row["tokens"][1] + 1)


def mask_shifted(_: list[Row], row: Row) -> None:
    """The mask and the logprobs begin and end one position early."""
    places = sampled(row)
    logprobs = [row["logprobs"][place] for place in places]
    row["masked_tokens"][places[0] - 1], row["masked_tokens"][places[-1]] = row["tokens"][places[0] - 1], -100
    row["logprobs"][places[-1]] = 1.0
    for place, value in zip(places, logprobs, strict=True):
        row["logprobs"][place - 1] = value
    counted(row)


def only_mask_shifted(_: list[Row], row: Row) -> None:
    places = sampled(row)
    row["masked_tokens"][places[0] - 1], row["masked_tokens"][places[-1]] = row["tokens"][places[0] - 1], -100


def cut(name: str, count: int = 3) -> Damage:
    def damage(_: list[Row], row: Row) -> None:
        del row[name][-count:]

    return damage


def whole_row_cut(_: list[Row], row: Row) -> None:
    """All three arrays end early, and text and counts agree with them."""
    for name in ("tokens", "masked_tokens", "logprobs"):
        del row[name][-5:]
    row["full_text"] = tokenizer().decode(row["tokens"], skip_special_tokens=False)
    counted(row)


def retokenised(_: list[Row], row: Row) -> None:
    """The sampled ids become those that the tokenizer chooses for their text: another set, of the same number."""
    encoder, start = tokenizer(), sampled(row)[0]
    text = encoder.decode(row["tokens"][start:], skip_special_tokens=False)
    ids = encoder.encode(text, add_special_tokens=False).ids
    row["tokens"][start:], row["masked_tokens"][start:] = ids, list(ids)


def split_token(_: list[Row], row: Row) -> None:
    """One sampled token becomes two with the same text, and the arrays stay aligned."""
    encoder = tokenizer()
    place = next(p for p in sampled(row) if len(encoder.decode([row["tokens"][p]])) > 3)
    text = encoder.decode([row["tokens"][place]])
    ids = [encoder.encode(part, add_special_tokens=False).ids for part in (text[:2], text[2:])]
    pieces = [*ids[0], *ids[1]]
    row["tokens"][place : place + 1] = row["masked_tokens"][place : place + 1] = pieces
    row["logprobs"][place : place + 1] = [row["logprobs"][place] / len(pieces)] * len(pieces)
    counted(row)


def outside_vocabulary(_: list[Row], row: Row) -> None:
    put(row, sampled(row)[2], 1_000_000)


def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(shared_tokenizer_directory() / "tokenizer.json"))


NAMED: dict[str, tuple[Damage, str]] = {
    "shifted to the left": (values(lambda v: [*v[1:], v[-1]]), "shifted"),
    "shifted to the right": (values(lambda v: [v[0], *v[:-1]]), "shifted"),
    "shifted by two": (values(lambda v: [*v[2:], *v[-2:]]), "shifted"),
    "in base 10": (values(lambda v: [x / math.log(10) for x in v]), "scaled"),
    "in base 2": (values(lambda v: [x / math.log(2) for x in v]), "scaled"),
    "negated": (values(lambda v: [-x for x in v]), "scaled"),
    "times a factor": (values(lambda v: [x * 0.7 for x in v]), "scaled"),
    "probabilities": (values(lambda v: [math.exp(x) for x in v]), "probabilities"),
    "reversed": (values(lambda v: v[::-1]), "reordered"),
    "filled up with 0": (values(lambda v: [*v[:-4], *[0.0] * 4]), "filled"),
    "filled up with 1": (values(lambda v: [*v[:-4], *[1.0] * 4]), "filled"),
    "filled up with -1": (values(lambda v: [-1.0] * len(v)), "filled"),
    "one logprob changed": (values(lambda v: [*v[:4], v[4] - 0.3, *v[5:]]), "logprobs_changed"),
    "rounded to tenths alone": (values(lambda v: [round(x - 0.02, 1) for x in v]), "other_context"),
    "of the other choice": (another_choice, "another_row"),
    "two tokens swapped": (swapped_tokens, "tokens_changed"),
    "a token changed": (changed_token, "tokens_changed"),
    "a prompt token changed": (changed_prompt, "other_context"),
    "the mask shifted with its logprobs": (mask_shifted, "mask_shifted"),
    "the mask shifted alone": (only_mask_shifted, "mask_shifted"),
    "tokens cut": (cut("tokens"), "truncated"),
    "logprobs cut": (cut("logprobs", 1), "truncated"),
    "masks cut": (cut("masked_tokens"), "truncated"),
    "the whole row cut": (whole_row_cut, "truncated"),
    "a turn encoded again": (retokenised, "retokenised"),
    "a token split": (split_token, "retokenised"),
}

FAULTS: dict[str, tuple[Damage, str]] = {
    "an end-of-turn token doubled": (doubled_end, "doubled_end"),
    "an id outside the vocabulary": (outside_vocabulary, "outside_vocabulary"),
    "a token changed": (changed_token, "sampled_text"),
    "two tokens swapped": (swapped_tokens, "sampled_text"),
    "a prompt token changed": (changed_prompt, "masked_text"),
    "the mask shifted with its logprobs": (mask_shifted, "turns"),
    "the mask shifted alone": (only_mask_shifted, "masked_logprob"),
    "logprobs cut": (cut("logprobs", 1), "length"),
    "the whole row cut": (whole_row_cut, "turns"),
    "a token split": (split_token, "turns"),
    "probabilities": (values(lambda v: [math.exp(x) for x in v]), "sampled_logprob"),
}


def found_in(path: Path, server: RunningServer) -> dict[str, set[str]]:
    """Kinds of faults and diagnoses of the damaged row; nothing is found in any other."""
    done = verify_here(path, "--json", "--quiet", *at(server))
    assert done.returncode == 6, done.stdout + done.stderr
    assert done.stderr.startswith("error: "), done.stderr
    found = report(done)
    assert not found["ok"]
    for finding in [*found["faults"], *found["diagnoses"]]:
        assert [place["row"] for place in finding["places"]] == [DAMAGED_ROW], finding
    return {name: {finding["kind"] for finding in found[name]} for name in ("faults", "diagnoses")}


@pytest.mark.parametrize("name", NAMED)
def test_damage_is_named(name: str, honest: Path, server: RunningServer, tmp_path: Path) -> None:
    damage, kind = NAMED[name]
    found = found_in(damaged(honest, tmp_path / "damaged.parquet", damage), server)
    assert found["diagnoses"] == {kind}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_needs_no_score_is_found(name: str, honest: Path, server: RunningServer, tmp_path: Path) -> None:
    damage, kind = FAULTS[name]
    found = found_in(damaged(honest, tmp_path / "damaged.parquet", damage), server)
    assert kind in found["faults"]


def test_a_beginning_that_the_model_saw_once_and_the_row_has_twice_is_named(tmp_path: Path) -> None:
    directory = shutil.copytree(shared_tokenizer_directory(), tmp_path / "tokenizer")
    config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    config |= {"bos_token": "<|im_start|>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")

    def doubled(_: list[Row], row: Row) -> None:
        row["tokens"].insert(0, row["tokens"][0])
        row["masked_tokens"].insert(0, -100)
        row["logprobs"].insert(0, 1.0)
        row["full_text"] = "<|im_start|>" + row["full_text"]
        for turn in row["metadata"]["turns"]:
            turn["start"], turn["end"] = turn["start"] + 1, turn["end"] + 1
        counted(row)

    with running_server("vllm", "--tokenizer", directory) as server:
        honest = record(server, tmp_path)
        assert verify_here(honest, "--quiet", *at(server)).returncode == 0
        found = found_in(damaged(honest, tmp_path / "damaged.parquet", doubled), server)
    assert found == {"faults": set(), "diagnoses": {"doubled_bos"}}


def test_damage_in_every_row_is_counted_in_every_row(honest: Path, server: RunningServer, tmp_path: Path) -> None:
    def every_row(rows: list[Row], _: Row) -> None:
        for row in rows:
            values(lambda v: [*v[1:], v[-1]])(rows, row)

    done = verify_here(damaged(honest, tmp_path / "damaged.parquet", every_row), "--json", *at(server))
    found = report(done)
    assert found["beyond_tolerance"]["rows"] == found["compared_rows"] == len(rows_at(honest))
    (diagnosis,) = found["diagnoses"]
    assert diagnosis["kind"] == "shifted"
    assert diagnosis["rows"] + found["undiagnosed_rows"] == len(rows_at(honest))
    assert diagnosis["rows"] >= 10  # of two positions nothing can be told
    assert len(diagnosis["places"]) == 5


def test_small_differences_in_every_row_are_rounding_and_not_damage(
    honest: Path, server: RunningServer, tmp_path: Path
) -> None:
    def every_row(rows: list[Row], _: Row) -> None:
        for row in rows:
            values(lambda v: [round(x * 40) / 40 - 0.0125 for x in v])(rows, row)

    path = damaged(honest, tmp_path / "damaged.parquet", every_row)
    done = verify_here(path, "--json", *at(server))
    assert {finding["kind"] for finding in report(done)["diagnoses"]} == {"rounding"}
    assert "--tolerance 0.5" in done.stderr
    assert verify_here(path, *at(server), "--tolerance", 0.5).returncode == 0


def test_the_damages_are_damages(honest: Path) -> None:
    for name, (damage, _) in {**NAMED, **FAULTS}.items():
        rows = rows_at(honest)
        before = copy.deepcopy(rows)
        damage(rows, rows[DAMAGED_ROW])
        assert rows != before, name
