"""Write a GGUF file's tensors as float32, with everything else it says kept.

usage: gguf_to_f32.py SOURCE.gguf TARGET.gguf

A quantised file computes in its own arithmetic, which no float32 forward pass can be held against; this one can.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

WRITTEN_BY_THE_WRITER = {"general.architecture", "general.file_type", "general.quantization_version"}


def convert(source: Path, target: Path) -> None:
    """`source` with float32 tensors, at `target`; `target` appears only once it is complete."""
    reader = GGUFReader(source)
    unfinished = target.with_name(target.name + ".partial")
    writer = GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        # "GGUF." fields are the file header, not metadata.
        if name.startswith("GGUF.") or name in WRITTEN_BY_THE_WRITER:
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=element)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
