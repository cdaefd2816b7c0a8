"""Start a real inference server, wait until it answers, and end it with everything it spawned.

    with running("vllm", environment=venv, log_folder=tmp_path) as server:
        ...  # server.base_url

`install.sh` makes the environment. A server runs as the leader of its own process group, which is ended by its id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent

CONTEXT_LENGTH = 2048
GRACE_SECONDS = 20.0  # from TERM to KILL; vLLM needs a few to end its workers
LOG_TAIL_LINES = 40
SERVED_NAME = "smollm2"

# No server here may look for files on a hub or report its use.
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}


class ServerFailed(RuntimeError):
    """A real server did not start: the message ends with the last lines of its log."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one kind of server is started.

    Attributes:
        command: arguments; {python}, {bin}, {overlays}, {model} and {port} are filled in.
        variables: environment variables, filled in alike.
        model: the model it serves unless told otherwise, below the environment's `models` folder.
        ready_path: answers 200 once the server can generate.
        start_seconds: how long a start may take; several times what it takes on two cores with a cold disk.
    """

    command: tuple[str, ...]
    ready_path: str
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    model: str = "smollm2-135m"
    start_seconds: float = 300.0


RECIPES = {
    # As a user starts it, with only what the machine needs: the model's generation_config.json stays in force.
    "vllm": Recipe(
        command=(
            *("{bin}/vllm", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
            *("--served-model-name", SERVED_NAME, "--dtype", "float32"),
            *("--max-model-len", str(CONTEXT_LENGTH), "--enforce-eager"),
        ),
        variables={"VLLM_CPU_KVCACHE_SPACE": "1"},  # GiB
        ready_path="/health",
    ),
    "trl": Recipe(
        command=(
            *("{python}", "{overlays}/trl/bin/trl", "vllm-serve", "--model", "{model}"),
            *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32"),
            *("--max_model_len", str(CONTEXT_LENGTH), "--enforce_eager", "true"),
        ),
        variables={"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": "{overlays}/trl"},
        ready_path="/health/",
    ),
    # From TRL 1.11 on, `trl vllm-serve` starts `vllm serve` with logprobs taken after all filters.
    "trl-vllm": Recipe(
        command=(
            *("{python}", "{overlays}/trl-vllm/bin/trl", "vllm-serve", "--model", "{model}"),
            *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32"),
            *("--max_model_len", str(CONTEXT_LENGTH), "--enforce_eager", "true"),
        ),
        variables={"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": "{overlays}/trl-vllm"},
        ready_path="/health",
    ),
    "sglang": Recipe(
        command=(
            *("{python}", "-m", "sglang.launch_server", "--model-path", "{model}"),
            *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32"),
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--context-length", str(CONTEXT_LENGTH), "--max-total-tokens", "8192"),
            *("--max-running-requests", "16", "--mem-fraction-static", "0.3", "--skip-server-warmup"),
        ),
        variables={"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{HERE / 'stubs'}{os.pathsep}{{overlays}}/sglang"},
        ready_path="/health",
    ),
    "llamacpp": Recipe(
        command=("{python}", str(HERE / "llamacpp_server.py"), "{model}", "{port}"),
        model="smollm2-135m-f32.gguf",
        ready_path="/health",
        start_seconds=60.0,
    ),
}
RECIPES["llamacpp-exact"] = dataclasses.replace(RECIPES["llamacpp"], command=(*RECIPES["llamacpp"].command, "exact"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server that answers.

    Attributes:
        model: the path it was started with.
        start_seconds: what its start took.
        group: the id of its process group.
    """

    kind: str
    base_url: str
    model: Path
    log: Path
    start_seconds: float
    group: int

    def kill(self) -> None:
        """End it and everything it spawned at once, as a machine that runs out of memory does."""
        os.killpg(self.group, signal.SIGKILL)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


@contextlib.contextmanager
def running(
    kind: str,
    *,
    environment: Path,
    log_folder: Path | None = None,
    model: str | None = None,
    port: int | None = None,
    extra_arguments: Sequence[str] = (),
) -> Iterator[RunningServer]:
    """A real server of `kind`, ready; ended when the block is left, however it is left.

    Args:
        environment: the virtual environment that `install.sh` made.
        log_folder: where the server's log goes and stays; a new temporary folder when None.
        model: name below the environment's `models` folder; the recipe's own when None.
        port: a free one when None.

    Raises:
        ServerFailed: it ended early or was not ready in time.
    """
    recipe = RECIPES[kind]
    port = free_port() if port is None else port
    model_path = environment / "models" / (model or recipe.model)
    folder = Path(tempfile.mkdtemp(prefix="real-servers-")) if log_folder is None else log_folder
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{kind}-{port}.log"
    places = {
        "python": str(environment / "bin" / "python"),
        "bin": str(environment / "bin"),
        "overlays": str(environment),
        "model": str(model_path),
        "port": str(port),
    }
    command = [part.format(**places) for part in recipe.command] + list(extra_arguments)
    base_url = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    with _process_group(command, _environment_variables(recipe, places), log) as process:
        _wait_until_ready(kind, process, base_url + recipe.ready_path, started + recipe.start_seconds, log)
        took = time.monotonic() - started
        print(f"{kind}: ready after {took:.0f} s at {base_url}", flush=True)
        yield RunningServer(
            kind=kind, base_url=base_url, model=model_path, log=log, start_seconds=took, group=process.pid
        )


def _environment_variables(recipe: Recipe, places: dict[str, str]) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # The environment's own commands first: vLLM looks for `ninja` on the path.
    variables["PATH"] = places["bin"] + os.pathsep + variables.get("PATH", os.defpath)
    return variables | OFFLINE | {name: value.format(**places) for name, value in recipe.variables.items()}


@contextlib.contextmanager
def _process_group(command: list[str], variables: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the process id is then the id of the group
        )
    try:
        yield process
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """TERM to the whole group, KILL to what is left of it after the grace; a hung TRL ignores TERM."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        deadline = time.monotonic() + seconds
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # collects the leader, so that an empty group is seen as gone
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            break
    process.wait(timeout=GRACE_SECONDS)


def _wait_until_ready(kind: str, process: subprocess.Popen[bytes], url: str, deadline: float, log: Path) -> None:
    while True:
        if process.poll() is not None:
            raise ServerFailed(f"{kind} ended with status {process.returncode} before it was ready\n{_log_tail(log)}")
        if _answers(url):
            return
        if time.monotonic() > deadline:
            raise ServerFailed(f"{kind} was not ready in time: {url} does not answer 200\n{_log_tail(log)}")
        time.sleep(0.25)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy of the machine
    try:
        with opener.open(url, timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _log_tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"last lines of {log}:", *(f"  | {line}" for line in lines)])
