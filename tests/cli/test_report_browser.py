"""The report in a real browser; skipped only where there is none (`chromium` on the path, or `CHROMIUM`)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from managed_cli.cli.report.write import write_report
from managed_cli.node import SequenceNode
from managed_cli.storage.reader import open_recording
from managed_cli.storage.shards import open_output
from managed_cli.types import IGNORED_TOKEN_ID, MASKED_LOGPROB
from tests.cli.browser import Page, find_browser
from tests.storage.rows import RUN_FACTS, fill, make_node, make_sample, write_output

BROWSER = find_browser()

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

HOSTILE = "</script><script>owned=1</script><img src=x onerror=owned=1>\x1b[2J \u202egnp.exe\u2028\x00 \x9b"

Looking = Callable[[Page], Awaitable[None]]


def in_browser(path: Path, look: Looking) -> None:
    """Open the report at `path`, look at it, and find that it had no fault and asked for nothing."""

    async def main() -> None:
        assert BROWSER is not None
        async with Page.opened(BROWSER) as page:
            await page.look(width=1280, height=900, scheme="light")
            await page.open(path)
            await look(page)
            assert page.faults == []
            assert [url for url in page.requests if url != path.as_uri()] == []

    asyncio.run(main())


def axe() -> str:
    """The script of axe-core."""
    spec = importlib.util.find_spec("axe_core_python")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return (Path(spec.submodule_search_locations[0]) / "axe.min.js").read_text("utf-8")


def conversation(
    sample_id: str, choice: int, turns: list[tuple[str, str]], tokenizer: Tokenizer, **more: Any
) -> SequenceNode:
    """A row of prompts and answers, one token a byte."""
    tokens: list[int] = []
    kept: list[bool] = []
    spans = []
    for prompt, answer in turns:
        sent, sampled = tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids
        begin = len(tokens) + len(sent)
        spans.append({"start": begin, "end": begin + len(sampled), "finish_reason": "stop", "text": answer})
        tokens += sent + sampled
        kept += [False] * len(sent) + [True] * len(sampled)
    return SequenceNode(
        full_text=tokenizer.decode(tokens, skip_special_tokens=False),
        tokens=tokens,
        masked_tokens=[token if is_kept else IGNORED_TOKEN_ID for token, is_kept in zip(tokens, kept, strict=True)],
        logprobs=[-0.25 if is_kept else MASKED_LOGPROB for is_kept in kept],
        metadata={**make_node(sample_id, choice).metadata, "turns": spans, **more},
    )


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A tokenizer of single bytes in `tmp_path/model`, as a local model has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    return made


def report(tmp_path: Path, *samples: list[SequenceNode]) -> Path:
    facts = {**RUN_FACTS, "tokenizer": str(tmp_path / "model")}
    with open_output(f"{tmp_path}/out.parquet", run_facts=facts, rows_per_shard=100) as output:
        fill(output, samples)
        finished = output.finish()
    write_report(open_recording(finished), str(tmp_path / "report.html"), None)
    return tmp_path / "report.html"


async def text_of(page: Page, selector: str) -> list[str]:
    found: list[str] = await page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
    return found


def test_a_conversation_is_shown_turn_by_turn_and_token_by_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = report(tmp_path, [conversation("q", 0, [("4+3?", "7"), (" sure?", "é7")], tokenizer)])

    async def look(page: Page) -> None:
        assert await text_of(page, ".part .text") == ["4+3?", "7", " sure?", "é7"]
        titles = await text_of(page, ".part h4")
        assert titles[0] == "sent, masked: 4 tokens"
        assert titles[3] == "sampled, turn 2: 3 tokens, stop, mean logprob -0.250"
        await page.run("document.querySelectorAll('.part .text')[3].focus()")
        await page.press("ArrowRight")
        await page.press("ArrowRight")
        id_of_byte = tokenizer.encode("é").ids[1]
        (told,) = await text_of(page, "#token")
        assert told == f"token 12 of 14, “é”, id {id_of_byte}, sampled, logprob -0.250, probability 77.9%"
        await page.press("Home")
        assert "part of the next" in (await text_of(page, "#token"))[0]
        await page.run(
            "document.querySelector('.masked .t').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
        )
        assert "masked: it was sent" in (await text_of(page, "#token"))[0]

    in_browser(path, look)


def test_hostile_text_is_text_and_nothing_of_it_runs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = report(
        tmp_path, [conversation(HOSTILE.replace("\x00", ""), 0, [(HOSTILE, HOSTILE)], tokenizer, hostile=HOSTILE)]
    )

    async def look(page: Page) -> None:
        assert await page.run("typeof owned") == "undefined"
        assert await page.run("document.querySelectorAll('img').length") == 0
        sent, sampled = await text_of(page, ".part .text")
        assert sent == sampled
        assert sampled.startswith("</script><script>owned=1</script><img src=x")
        assert "\\x1b[2J \\u202egnp.exe\\u2028\\x00 \\x9b" in sampled
        everything = await page.run("document.body.innerText + document.title")
        assert not [character for character in everything if character in "\x1b\u202e\u2028\x00\x9b"]

    in_browser(path, look)


def test_a_very_long_line_is_shown_in_steps_and_stays_inside_the_page(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = report(tmp_path, [conversation("long", 0, [("?", "x" * 100_000)], tokenizer)])

    async def look(page: Page) -> None:
        assert await page.run("document.querySelectorAll('.sampled .t').length") == 4000
        await page.run("document.querySelector('.sampled > button').click()")
        assert await page.run("document.querySelectorAll('.sampled .t').length") == 8000
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")

    in_browser(path, look)


def test_a_tree_is_drawn_and_its_nodes_can_be_chosen(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        conversation("q", 0, [("a", "b")], tokenizer, node_id="0"),
        conversation("q", 0, [("a", "b"), ("c", "d")], tokenizer, node_id="1", parent_id="0"),
        conversation("q", 1, [("a", "b"), ("c", "e")], tokenizer, node_id="2", parent_id="0"),
    ]

    async def look(page: Page) -> None:
        assert len(await text_of(page, ".tree > li > ul > li")) == 2
        await page.run("document.querySelectorAll('.tree ul button')[1].click()")
        await page.until("document.querySelector('.numbers').textContent.startsWith('row 2, node 2')")
        assert (await text_of(page, ".part .text"))[-1] == "e"
        assert await page.run("location.hash") == "#row=2"

    in_browser(report(tmp_path, rows), look)


def test_the_list_is_searched_filtered_and_walked_by_keys(tmp_path: Path, tokenizer: Tokenizer) -> None:
    samples = [[conversation(f"s-{index}", 0, [("?", f"answer {index}")], tokenizer)] for index in range(200)]

    async def look(page: Page) -> None:
        assert await page.run("document.querySelectorAll('.entry').length") < 40
        await page.run("document.getElementById('list').focus()")
        await page.press("End")
        await page.until("document.querySelector('#detail h3').textContent === 's-199, choice 0'")
        assert await page.run(
            "document.getElementById(document.activeElement.getAttribute('aria-activedescendant')) !== null"
        )
        await page.press("ArrowUp")
        await page.until("document.querySelector('#detail h3').textContent === 's-198, choice 0'")
        await page.run("document.getElementById('search').focus()")
        await page.type("ANSWER 17")
        await page.until("document.getElementById('found').textContent === '11 of 200 rows'")
        assert (await text_of(page, ".entry b"))[:2] == ["s-17", "s-170"]

    in_browser(report(tmp_path, *samples), look)


def test_without_the_tokenizer_tokens_are_ids_and_the_text_is_there(tmp_path: Path) -> None:
    path = write_output(tmp_path / "out.parquet", [make_sample(0)])
    write_report(open_recording(path), str(tmp_path / "report.html"), None)
    row = open_recording(path).row(0)

    async def look(page: Page) -> None:
        assert await text_of(page, ".t") == [str(token) for token in row["tokens"]]
        assert "tokens are shown by their ids" in (await text_of(page, "#detail .hint"))[0]
        assert "prompt 0 completion 0" in (await text_of(page, "#detail pre"))[0]

    in_browser(tmp_path / "report.html", look)


def test_the_theme_follows_the_system_until_it_is_chosen(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"

    async def look(page: Page) -> None:
        light = await page.run(ground)
        await page.look(width=1280, height=900, scheme="dark")
        dark = await page.run(ground)
        assert light != dark
        await page.run("document.getElementById('theme').click()")
        assert await page.run(ground) == light

    in_browser(report(tmp_path, [conversation("q", 0, [("?", "!")], tokenizer)]), look)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong_and_nothing_is_wider_than_the_screen(
    tmp_path: Path, tokenizer: Tokenizer, width: int, scheme: str
) -> None:
    rows = [
        conversation("q", 0, [("a", "b")], tokenizer, node_id="0"),
        conversation("q", 1, [("a", "b"), ("c", "d" * 30)], tokenizer, node_id="1", parent_id="0", server="http://b"),
    ]

    async def look(page: Page) -> None:
        await page.look(width=width, height=900, scheme=scheme)
        await page.run("document.querySelectorAll('details').forEach(e => e.open = true)")
        await page.run(axe() + "; undefined")
        violations = await page.run(
            "axe.run().then(found => found.violations.map(v => [v.id, v.impact, v.nodes[0].html]))"
        )
        assert violations == []
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")

    in_browser(report(tmp_path, rows), look)
