"""Text that goes on from text that is known is the text of all ids, wherever they are cut in two."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_cli.tokenizers import HuggingFaceTokenizer, load_tokenizer
from managed_cli.tracking.continued import continued_text
from tests.servers.tokenizer import shared_tokenizer_directory
from tests.tokenizers import catalog


@pytest.fixture(scope="module", params=["shared", "smollm2", "qwen3", "llama2", "gemma3"])
def tokenizer(request: pytest.FixtureRequest) -> HuggingFaceTokenizer:
    if request.param == "shared":
        return load_tokenizer(str(shared_tokenizer_directory()))
    found = catalog.directory_or_reason(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return load_tokenizer(str(found))


def test_text_that_goes_on_is_the_text_of_the_whole(tokenizer: HuggingFaceTokenizer) -> None:
    split = tokenizer.encode_rendered("🦜½漢")  # characters of several ids in a small vocabulary

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def same(data: st.DataObject) -> None:
        known = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(split))
        ids = data.draw(st.lists(known, max_size=12))
        cut = data.draw(st.integers(0, len(ids)))
        before, after = ids[:cut], ids[cut:]
        assert continued_text(tokenizer.decode(before), before, after, tokenizer) == tokenizer.decode(ids)

    same()
