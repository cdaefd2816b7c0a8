"""Files as they are published. They are not part of the project.

They are read from the directory that MANAGED_CLI_DATA_DIR names, else from `shared/data` beside the checkout.

What they taught is tested on small files of our own: `examples/inputs/`, and the tests beside this one.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from managed_cli.rollout.tasks import InputOptions, InputReport, Task, read_tasks, validate_input

BESIDE_THE_CHECKOUT = Path(__file__).parents[3] / "shared" / "data"

OPTIONS = {
    "gsm8k_200.jsonl": InputOptions(prompt_field="question"),
    "mt_bench_question.jsonl": InputOptions(id_field="question_id"),
    "HumanEval.jsonl.gz": InputOptions(id_field="task_id"),
    "sharegpt_120.jsonl": InputOptions(),
    "nemo_gym_calendar.jsonl": InputOptions(),
}


def published(name: str) -> Path:
    folder = Path(os.environ.get("MANAGED_CLI_DATA_DIR") or BESIDE_THE_CHECKOUT)
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not in {folder}; MANAGED_CLI_DATA_DIR names a directory that has it")
    return folder / name


def records_of(path: Path) -> list[dict[str, object]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def read(name: str) -> tuple[InputReport, list[Task], list[dict[str, object]]]:
    path = published(name)
    return validate_input(path, OPTIONS[name]), list(read_tasks(path, OPTIONS[name])), records_of(path)


def test_gsm8k_takes_its_prompts_from_question() -> None:
    report, tasks, records = read("gsm8k_200.jsonl")
    assert (report.text_prompts, report.kinds) == (200, {"prompt": 200})
    assert [(task.prompt, task.fields) for task in tasks] == [
        (record["question"], {"answer": record["answer"]}) for record in records
    ]


def test_human_eval_is_read_from_gzip_under_its_task_ids() -> None:
    _, tasks, records = read("HumanEval.jsonl.gz")
    assert len(tasks) == 164
    assert [{"task_id": task.sample_id, "prompt": task.prompt, **task.fields} for task in tasks] == records


def test_mt_bench_is_two_turns_a_question() -> None:
    report, tasks, records = read("mt_bench_question.jsonl")
    assert (report.turn_lists, report.samples) == (80, 80)
    assert [(task.sample_id, list(task.turns or ())) for task in tasks] == [
        (str(record["question_id"]), record["turns"]) for record in records
    ]


def test_sharegpt_ends_with_the_last_question() -> None:
    report, tasks, records = read("sharegpt_120.jsonl")
    assert report.kinds == {"sharegpt": 120}
    for task, record in zip(tasks, records, strict=True):
        said = [turn["value"] for turn in record["conversations"]]  # type: ignore[attr-defined]  # JSON
        assert task.messages is not None
        assert [message["content"] for message in task.messages] == said[:-1]
        assert task.messages[-1]["role"] == "user"
        assert task.fields == {"dropped_turns": [{"role": "assistant", "content": said[-1]}]}


def test_nemo_gym_keeps_its_messages_and_what_verifies_them() -> None:
    report, tasks, records = read("nemo_gym_calendar.jsonl")
    assert report.kinds == {"nemo-gym": 5}
    for task, record in zip(tasks, records, strict=True):
        params = record["responses_create_params"]
        assert list(task.messages or ()) == params["input"]  # type: ignore[index]  # JSON
        assert (task.tools, task.fields) == (None, {"exp_cal_state": record["exp_cal_state"]})


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "nemo_gym_calendar.jsonl"])
def test_the_same_data_as_parquet_is_the_same_samples(tmp_path: Path, name: str) -> None:
    report, tasks, records = read(name)
    path = tmp_path / "data.parquet"
    columns = {key: None for record in records for key in record}
    pq.write_table(pa.Table.from_pylist([{**columns, **record} for record in records]), path)
    again = validate_input(path, OPTIONS[name])
    assert (again.fingerprint, again.kinds) == (report.fingerprint, report.kinds)
    assert [task.fields for task in read_tasks(path, OPTIONS[name])] == [task.fields for task in tasks]
