"""How the lines of an input are to be understood."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Literal, get_args

from managed_cli.errors import ConfigError
from managed_cli.types import SamplingParams

InputFormat = Literal["auto", "prompt", "token-ids", "messages", "turns", "sharegpt", "openai-batch", "nemo-gym"]
"""What a line is; `auto` recognises each line by its fields."""

INPUT_FORMATS: tuple[InputFormat, ...] = get_args(InputFormat)

OnBadLine = Literal["fail", "skip"]
"""Whether a line that cannot be used ends the run before its first request, or is a failed sample of it."""

ON_BAD_LINE: tuple[OnBadLine, ...] = get_args(OnBadLine)

DEFAULT_PROMPT_FIELD = "prompt"
DEFAULT_ID_FIELD = "id"

CHAT_FIELDS = frozenset(
    {"messages", "turns", "conversations", "system", "tools", "sampling", "responses_create_params"}
)
"""Fields with a meaning of their own, which no option can rename."""

_FORMATS_WITH_A_PROMPT_FIELD = frozenset({"auto", "prompt", "token-ids", "messages"})


@dataclasses.dataclass(frozen=True, slots=True)
class InputPart:
    """Part `index` of `count`, from 1: the samples whose ids fall there, wherever they stand in the input."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> InputPart:
        """The part that `I/N` names.

        Raises:
            ConfigError: it names none.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise ConfigError(f"--part {text}: expected I/N with 1 <= I <= N, as in 3/16")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, sample_id: str) -> bool:
        """Whether the sample is one of this part's: by a hash of its id, so that lines may move and be added."""
        digest = hashlib.blake2b(sample_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.count == self.index - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """How lines are understood.

    Attributes:
        input_format: what every line is; other dialects' fields are then ordinary ones.
        prompt_field: takes the place of `prompt`; None for that name.
        id_field: where the id stands. Under another name than `id`, every line must have one.
        system: system message for chats that have none.
        limit: use only the first samples of all files together; None for all.
        sampling: the run's settings, against which n and temperature of a line are checked; None to check lines alone.
        keep_last_assistant: assistant turns at the end of a ShareGPT conversation are kept, and the last is continued;
            otherwise they are the answers to be sampled anew, and kept as a field only.
        on_bad_line: what a line that cannot be used does to the run.
        part: use only the samples of this part, of those that `limit` leaves; None for all.

    Raises:
        ConfigError: options that cannot be meant together.
    """

    input_format: InputFormat = "auto"
    prompt_field: str | None = None
    id_field: str = DEFAULT_ID_FIELD
    system: str | None = None
    limit: int | None = None
    sampling: SamplingParams | None = None
    keep_last_assistant: bool = False
    on_bad_line: OnBadLine = "fail"
    part: InputPart | None = None

    def __post_init__(self) -> None:
        for option, name in (("--prompt-field", self.prompt_field), ("--id-field", self.id_field)):
            if name in CHAT_FIELDS:
                raise ConfigError(f"{option} {name}: `{name}` has a meaning of its own, expected another field")
        if self.id_field == self.text_field:
            raise ConfigError(f"--id-field {self.id_field}: expected another field than the prompt's")
        if self.prompt_field is not None and self.input_format not in _FORMATS_WITH_A_PROMPT_FIELD:
            raise ConfigError(
                f"--prompt-field {self.prompt_field}: lines of --input-format {self.input_format} have no such field"
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit}: expected at least 1")

    @property
    def text_field(self) -> str:
        """The field of prompts that are no chat."""
        return DEFAULT_PROMPT_FIELD if self.prompt_field is None else self.prompt_field
