"""Files of safetensors, written by the format's description."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

NAMES = {"float32": "F32", "bfloat16": "BF16", "int32": "I32", "float8_e4m3fn": "F8_E4M3"}


def write_file(path: Path, arrays: Mapping[str, np.ndarray], **header: object) -> Path:
    """Write arrays, one after the other, with further entries of the header."""
    entries, data = dict(header), b""
    for name, array in arrays.items():
        begin, data = len(data), data + array.tobytes()
        entries[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_folder(folder: Path, files: Mapping[str, Mapping[str, np.ndarray]]) -> Path:
    """Write several files and their index."""
    folder.mkdir()
    for name, arrays in files.items():
        write_file(folder / name, arrays)
    places = {array: name for name, arrays in files.items() for array in arrays}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
