"""A GGUF file is served as the folder that its weights are dequantised to, once."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragserve.commands.options import settings_from, with_settings
from ragserve.config import Settings
from ragserve.engine import gguf_weights
from ragserve.engine.gguf_weights import as_folder, gguf_of
from ragserve.errors import InvalidRequest, StorageFull
from tests.conftest import MODEL
from tests.unit.engine.tiny_gguf import tiny_llama, write_gguf


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_the_folder_has_the_models_weights_and_its_tokens(file: Path, model: Any, tmp_path: Path) -> None:
    said: list[str] = []
    folder = as_folder(file, tmp_path / "models", said.append)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        wanted, found = model(ids).logits, served(ids).logits
    assert torch.nn.functional.cosine_similarity(wanted, found, dim=-1).min() > 0.999, "8 bits"
    text = "The observatory was founded in 1902."
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (MODEL, folder))
    wanted_ids = ours.encode(text, add_special_tokens=False)
    assert theirs.encode(text, add_special_tokens=False) == wanted_ids
    assert len(said) == 1

    assert as_folder(file, tmp_path / "models", said.append) == folder, "and is made once"
    assert len(said) == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == [folder.name], "nothing else is left"


def test_a_file_that_is_replaced_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    """Another fine-tune of a model has a file of the same size, and the same tokenizer at its beginning."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(5 * 2**20))
    before = gguf_weights.digest([path])
    with path.open("r+b") as stream:
        stream.seek(2**20 + 17)
        stream.write(b"x" * 2**20)
    assert gguf_weights.digest([path]) != before


def test_a_full_disk_leaves_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_weights, "_write", full)
    with pytest.raises(StorageFull, match="no room"):
        as_folder(file, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"GGUF and nothing more", "cannot be dequantised"), (b"", "cannot be dequantised")],
    ids=["damaged", "empty"],
)
def test_a_damaged_file_is_refused_in_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=says) as refused:
        as_folder(path, tmp_path / "models")
    assert "\n" not in str(refused.value)


def test_which_models_have_their_weights_in_gguf(file: Path, tmp_path: Path) -> None:
    assert gguf_of(str(MODEL)) is None
    assert gguf_of("Qwen/Qwen3-8B") is None
    renamed = shutil.copy(file, tmp_path / "weights")
    assert gguf_of(str(renamed)) == renamed
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert gguf_of(str(folder)) is None
    first = shutil.copy(file, folder / "a.gguf")
    assert gguf_of(str(folder)) == first
    shutil.copy(file, folder / "b.gguf")
    with pytest.raises(InvalidRequest, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        gguf_of(str(folder))
    part = shutil.copy(file, tmp_path / "model-00001-of-00003.gguf")
    with pytest.raises(InvalidRequest, match="one part"):
        gguf_of(str(part))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_commands_that_read_a_model_get_the_folder(file: Path, tmp_path: Path, elsewhere: bool) -> None:
    given: list[Settings] = []

    def command(settings: Settings) -> None:
        given.append(settings)

    run: Callable[..., Any] = with_settings(command, ["model", "data_dir", "engine_url"], make=settings_from)
    url = "http://127.0.0.1:9" if elsewhere else None
    run(model=str(file), data_dir=tmp_path, engine_url=url)
    inside = Path(given[0].model).is_relative_to(tmp_path / "models")
    assert inside is not elsewhere, "an engine elsewhere has its own model"
