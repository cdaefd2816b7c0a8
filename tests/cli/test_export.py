"""`managed-cli export` as a person or a script runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from managed_cli.cli.export import FORMAT_NAMES
from managed_cli.export.formats import formats
from managed_cli.types import IGNORED_TOKEN_ID
from tests.cli.rollout_command import at, command, environment, rollout, rows_of, write_prompts
from tests.cli.test_rollout_output import HEAVY, loaded_modules
from tests.servers.process import running_server

REWARDS = """
async def score(row):
    if row["fields"]["answer"] == 3:
        raise RuntimeError("no judge\\nat all")
    return float(len(row["completion"]))
"""


def export(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("export", *arguments), capture_output=True, text=True, check=False, cwd=cwd, env=environment()
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of conversations of two turns, two choices each, and a file of reward functions."""
    path = tmp_path_factory.mktemp("export")
    lines = [{"id": f"s{i}", "turns": [f"Question {i}?", "Are you sure?"], "answer": i} for i in range(3)]
    write_prompts(path / "in.jsonl", lines)
    (path / "my_rewards.py").write_text(REWARDS)
    with running_server("vllm") as server:
        done = rollout(
            "in.jsonl", *at(server), "-n", 2, "--max-tokens", 6, "--seed", 1, "--history", "verbatim", cwd=path
        )
    assert done.returncode == 0, done.stderr
    return path


def test_the_formats_of_help_are_those_there_are() -> None:
    assert list(FORMAT_NAMES) == list(formats())


def test_a_recorded_run_comes_out_as_groups_with_scores_and_the_counts_are_told(
    directory: Path, tmp_path: Path
) -> None:
    out = tmp_path / "groups.jsonl"
    done = export(
        "out.parquet", "--to", "atropos", "--reward", "my_rewards:score", "--out", out, "--json", cwd=directory
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(directory / "out.parquet")
    assert len(rows) == 6
    assert json.loads(done.stdout) == {
        "path": "out.parquet",
        "out": str(out),
        "format": "atropos",
        "rows": 6,
        "written": 6,
        "dropped": {},
        "samples": 3,
        "lines": 3,
    }
    assert done.stderr == (
        f"exported 6 of 6 rows, of 3 samples, to {out}; how to load it: managed-cli export --to atropos --describe\n"
    )
    groups = {line["sample_id"]: line for line in map(json.loads, out.read_text("utf-8").splitlines())}
    for row in rows:
        group = groups[row["sample_id"]]
        place = group["choice_indexes"].index(row["choice_index"])
        assert group["tokens"][place] == row["tokens"]
        assert group["masks"][place] == row["masked_tokens"]
        assert group["inference_logprobs"][place] == row["logprobs"]
        assert group["scores"][place] == len(row["metadata"]["turns"][-1]["text"])


def test_two_sampled_turns_are_one_completion_with_the_text_between_them_masked(
    directory: Path, tmp_path: Path
) -> None:
    done = export("out.parquet", "--to", "trl", "--out", tmp_path / "o.jsonl", cwd=directory)
    assert done.returncode == 0, done.stderr
    rows = {(row["sample_id"], row["choice_index"]): row for row in rows_of(directory / "out.parquet")}
    for line in map(json.loads, (tmp_path / "o.jsonl").read_text("utf-8").splitlines()):
        row = rows[line["sample_id"], line["choice_index"]]
        first, last = row["metadata"]["turns"]
        begins = len(line["prompt_ids"])
        assert begins == first["start"]
        assert line["prompt_ids"] + line["completion_ids"] == row["tokens"]
        inside = [begins + position for position, bit in enumerate(line["env_mask"]) if bit]
        assert inside == [*range(first["start"], first["end"]), *range(last["start"], last["end"])]
        assert inside == [p for p, mask in enumerate(row["masked_tokens"]) if mask != IGNORED_TOKEN_ID]


def test_an_error_of_the_reward_function_names_row_file_and_line_without_a_traceback(
    directory: Path, tmp_path: Path
) -> None:
    inputs = [{"id": "x", "prompt": "one", "answer": 0}, {"id": "y", "prompt": "two", "answer": 3}]
    write_prompts(tmp_path / "in.jsonl", inputs)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    with running_server("vllm") as server:
        assert rollout("in.jsonl", *at(server), "--concurrency", 1, "--max-tokens", 3, cwd=tmp_path).returncode == 0
    done = export("out.parquet", "--to", "trl", "--reward", "my_rewards:score", "--out", "o.jsonl", cwd=tmp_path)
    number = [row["sample_id"] for row in map(dict, _in_file_order(tmp_path))].index("y")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: --reward my_rewards:score: row {number} (sample y, choice 0) failed: RuntimeError: no judge at all\n"
        f'  {tmp_path}/my_rewards.py:4: raise RuntimeError("no judge\\nat all")\n'
        "  nothing was exported\n\n"
        f"hint: `managed-cli inspect PATH --row {number}` shows the row\n"
    )
    assert not (tmp_path / "o.jsonl").exists()


def _in_file_order(directory: Path) -> list[dict[str, object]]:
    import pyarrow.parquet as pq

    return pq.read_table(directory / "out.parquet", columns=["sample_id"]).to_pylist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "trl", "--out", "x"], "Missing argument 'PATH'"),
        (["out.parquet", "--to", "trl"], "Missing option '--out'"),
        (["out.parquet", "--out", "x"], "Missing option '--to'"),
        (["out.parquet", "--to", "nemo", "--out", "x"], "'nemo' is not one of"),
        (["out.parquet", "--to", "trl", "--describe"], "--describe takes neither PATH nor --out"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(directory: Path, arguments: list[str], message: str) -> None:
    done = export(*arguments, cwd=directory)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_recording_that_is_not_there_is_an_error_of_the_output(tmp_path: Path) -> None:
    done = export("nowhere.parquet", "--to", "trl", "--out", "x", cwd=tmp_path)
    assert done.returncode == 6
    assert done.stderr.startswith("error: `nowhere.parquet` does not exist\n")


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_describe_explains_every_column_and_how_to_load_it(name: str, tmp_path: Path) -> None:
    text = export("--to", name, "--describe", cwd=tmp_path)
    value = json.loads(export("--to", name, "--describe", "--json", cwd=tmp_path).stdout)
    assert (text.returncode, text.stderr) == (0, "")
    format = formats()[name]
    assert [field["name"] for field in value["fields"]] == [field.name for field in format.fields]
    for field in format.fields:
        assert f"{field.name} " in text.stdout
        assert field.meaning in text.stdout
    for line in (*format.loading, *format.conventions, format.source):
        assert line in text.stdout
    compile(value["loading"], name, "exec")


def test_help_and_describe_load_nothing_heavy() -> None:
    for arguments in (["export", "--help"], ["schema", "--help"], ["export", "--to", "trl", "--describe", "--json"]):
        assert not loaded_modules(*arguments) & set(HEAVY), arguments


def test_the_readme_lists_every_format_with_its_columns() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    for format in formats().values():
        columns = ", ".join(f"`{field.name}`" for field in format.fields)
        assert f"| `{format.name}` | {format.project.partition(':')[0]} | {format.unit} | {columns} |" in readme


def test_the_example_reward_scores_answers_and_leaves_out_lines_without_one(tmp_path: Path) -> None:
    lines = [{"id": "with", "prompt": "p", "answer": ""}, {"id": "without", "prompt": "p"}]
    write_prompts(tmp_path / "in.jsonl", lines)
    with running_server("vllm") as server:
        assert rollout("in.jsonl", *at(server), "-n", 2, "--max-tokens", 3, cwd=tmp_path).returncode == 0
    reward = "examples.rewards:holds_answer"  # found on PYTHONPATH
    done = export("out.parquet", "--to", "trl", "--reward", reward, "--out", "o.jsonl", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dropped"] == {"no_reward": 2}
    assert "dropped 2 rows: the reward function returned None\n" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text("utf-8").splitlines()]
    assert [(row["sample_id"], row["reward"], row["advantage"]) for row in rows] == [("with", 1.0, 0.0)] * 2
