"""Models that come as a GGUF file: their weights are dequantised once, into a Hugging Face folder below the
data folder, which is served in the file's place. SGLang runs GGUF weights on some GPUs only.

A model in bfloat16 takes two bytes a weight, on disk and, while it is made, in memory."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest, StorageFull
from ragserve.files import scratch_folder

_SHARD = "4GB"
_ADVICE = "Give --model the folder in Hugging Face's layout that it was made from, or that model's id."


def gguf_of(model: str) -> Path | None:
    """The GGUF file that has a model's weights; None for a model with others.

    Raises InvalidRequest for a file that is a part of several, and for a folder with several models."""
    path = Path(model)
    if path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:5])
            raise InvalidRequest(
                f"model: {path} has {len(files)} GGUF files: {names}",
                hint="Give --model one of them; join the parts of a split one with llama-gguf-split --merge.",
                param="model",
            )
        return files[0] if files else None
    if not path.is_file() or not _is_gguf(path):
        return None
    if "-of-000" in path.stem:
        raise InvalidRequest(
            f"model: {path} is one part of a GGUF model",
            hint="Join the parts first: llama-gguf-split --merge.",
            param="model",
        )
    return path


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def as_folder(file: Path, folder: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the Hugging Face folder in ``folder`` with the weights of a GGUF file, in bfloat16; make it if
    it is not there. ``say`` gets a line when that begins.

    Raises InvalidRequest for a file that transformers cannot read, and StorageFull."""
    return made_once(file, place(file, folder), _write, say)


def place(file: Path, folder: Path) -> Path:
    """The folder that `as_folder` makes of a file, there or not."""
    return folder / f"{file.stem}-{digest([file])}"


def made_once(
    source: Path, made: Path, write: Callable[[Path, Path], None], say: Callable[[str], None]
) -> Path:
    """Return the folder ``made``; if it is not there, let ``write`` make it of ``source``. It is there when
    it is complete.

    Raises StorageFull, and what ``write`` raises."""
    if (made / "config.json").is_file():
        return made
    say(f"note: the weights of {source} become a folder in bfloat16, once: {made}")
    folder = made.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch_folder(folder, ".new-") as temporary:
            new = temporary / "model"
            write(source, new)
            try:
                new.rename(made)
            except OSError:  # another process was faster
                if not (made / "config.json").is_file():
                    raise
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise StorageFull(
            f"model: there is no room in {folder} for the weights of {source}",
            hint="They take two bytes a weight: free some, or give another --data-dir.",
        ) from error
    return made


def digest(files: Sequence[Path]) -> str:
    """Eight hex digits over the files' sizes and samples of them, as those of a model's fingerprint."""
    from sglang_ext.documents.fingerprint import add_samples

    found = hashlib.blake2b(digest_size=4)
    for file in files:
        add_samples(found, file)
    return found.hexdigest()


def save(tensors: dict[str, Any], folder: Path) -> None:
    """Write weights into a new folder. Raises OSError (ENOSPC) before it writes if they do not fit."""
    from huggingface_hub import save_torch_state_dict

    if shutil.disk_usage(folder.parent).free < sum(tensor.nbytes for tensor in tensors.values()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    folder.mkdir()
    save_torch_state_dict(tensors, folder, max_shard_size=_SHARD)


def _write(file: Path, folder: Path) -> None:
    from ragserve.engine.compat import prepare

    prepare()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    try:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        config.architectures, config.dtype = [CLASSES[config.model_type]], "bfloat16"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        read = load_gguf_checkpoint(
            str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
        )
    # transformers raises NotImplementedError for architectures and quantisations that it cannot read
    except (ValueError, KeyError, NotImplementedError, ImportError, IndexError, struct.error) as error:
        raise InvalidRequest(
            f"model: {file} cannot be dequantised: {error}", hint=_ADVICE, param="model"
        ) from error
    tensors = read["tensors"]
    tied = set() if not config.tie_word_embeddings else {"lm_head.weight"}
    if missing := sorted(model.state_dict().keys() - tensors.keys() - tied):
        raise InvalidRequest(
            f"model: {file} lacks {len(missing)} weights: {', '.join(missing[:3])}",
            hint=_ADVICE,
            param="model",
        )
    save(tensors, folder)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)  # last: a folder without it is not complete
