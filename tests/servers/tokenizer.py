"""A small real tokenizer: byte-level BPE with ChatML specials, as a directory that `transformers.AutoTokenizer` loads.

Run as a program (`python -m tests.servers.tokenizer`) it prints the directory, building it where it does not exist yet.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1 and 2
VOCABULARY_SIZE = 640  # 3 specials, 256 bytes, the rest merges
MODEL_MAX_LENGTH = 4096

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CORPUS = """\
The capital of France is Paris. The capital of Italy is Rome, and the capital of Spain is Madrid.
What is the answer to the question? The answer is 42. Let us think about it step by step.
First, we add the two numbers: 12 + 30 = 42. Then we check that the sum is right, because it is easy to be wrong.
There are three apples on the table and four more in the basket, so there are seven apples in all.
If a train leaves at noon and travels for two hours at 60 miles per hour, it has gone 120 miles.
She sold half of her books in the morning and a third of the rest in the evening; how many are left?
def add(first, second):
    return first + second
for number in range(10):
    print(number, number * number)
user
assistant
system
You are a helpful assistant. Please answer the question of the user in one sentence.
I think that the user wants to know how the model works. <think> Let me see. </think> That is the reason.
It was the best of times, it was the worst of times. Once upon a time there was a small house in the forest.
The model reads the prompt, samples one token after another, and stops at the end of the turn or at the limit.
La réponse est donc quarante-deux. Où est la gare? C'est là, près du café.
Don't worry: we'll see what they're doing, and it's not what I'd expect.
"""

WORDS = (  # what the fake model likes to say; words of the corpus and of other texts
    " the and of a to in is that it was for on are with as they be at one have this from by hot word but what some "
    "we can out other were all there when up use your how said an each she which do their time if will way about "
    "many then them write would like so these her long make thing see him two has look more day could go come did "
    "number sound no most people my over know water than call first who may down side been now find any new work "
    "part take get place made live where after back little only round man year came show every good me give our "
    "under name very through just form sentence great think say help low line differ turn cause much mean before "
    "move right boy old too same "
    "answer = 42 7 12 + - * ( ) . , ; : ! ? \n \n\n é où café [bold] </think> <think> \\boxed{ } \t"
)
EMOJI = ("😀", "🎉", "🚀", "👩‍🔬", "日本", "é")  # in this tokenizer each character is several tokens


def make_tokenizer_directory(path: Path) -> Path:
    """`path`, filled with `tokenizer.json` and `tokenizer_config.json`; takes some tens of milliseconds."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[tokenizers.AddedToken(text, normalized=False, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS.splitlines(keepends=True), WORDS], trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def shared_tokenizer_directory() -> Path:
    """One directory for all processes; its name holds a digest of this file and the version of the library."""
    source = Path(__file__).read_bytes() + tokenizers.__version__.encode()
    owner = os.getuid() if hasattr(os, "getuid") else 0
    name = f"managed-cli-tokenizer-{owner}-{hashlib.sha256(source).hexdigest()[:16]}"
    target = Path(tempfile.gettempdir()) / name
    if not target.is_dir():
        building = make_tokenizer_directory(Path(tempfile.mkdtemp(prefix=name)))
        try:
            building.rename(target)
        except OSError:  # another process was faster; its directory has the same content
            shutil.rmtree(building)
    return target


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`, reversed)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class FakeTokenizer:
    """What a server knows of its tokenizer: ids, the bytes of each id, the chat template."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.raw = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.size = self.raw.get_vocab_size(with_added_tokens=True)
        self.eos_text = self._special("eos_token") or TURN_END
        self.bos_text = self._special("bos_token") or ""
        self.eos_id = self.raw.token_to_id(self.eos_text)
        self.special_ids = frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)
        self.names = [self.raw.id_to_token(i) or "" for i in range(self.size)]
        table = _byte_of_character()
        byte_level = "ByteLevel" in json.dumps(json.loads(self.raw.to_str())["decoder"])
        self.pieces = [self._piece(i, table, byte_level) for i in range(self.size)]
        self.texts = [piece.decode("utf-8", "replace") for piece in self.pieces]
        self.chat_template = self.config.get("chat_template") or self._template_file()

    def _special(self, name: str) -> str | None:
        value = self.config.get(name)
        return value["content"] if isinstance(value, dict) else value

    def _template_file(self) -> str:
        file = self.directory / "chat_template.jinja"
        return file.read_text(encoding="utf-8") if file.exists() else CHAT_TEMPLATE

    def _piece(self, token: int, table: dict[str, int], byte_level: bool) -> bytes:
        name = self.names[token]
        if byte_level and token not in self.special_ids and all(character in table for character in name):
            return bytes(table[character] for character in name)
        if len(name) == 6 and name.startswith("<0x"):  # SentencePiece's byte fallback
            return bytes([int(name[3:5], 16)])
        return name.replace("▁", " ").encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        text: str = self.raw.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(self.chat_template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_text,
            eos_token=self.eos_text,
        )


if __name__ == "__main__":
    print(shared_tokenizer_directory())
