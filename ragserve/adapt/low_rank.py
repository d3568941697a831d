"""A model of transformers with a low-rank adapter (LoRA, by peft), and what it may be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.adapt.checkpoints import write_tensors
from ragserve.adapt.composed_attention import PackedAttention, attend_packed, flex_differs
from ragserve.adapt.packing import PackedSequences, TrainingSequence, packed
from ragserve.engine.cpu_precision import cpu_dtype
from ragserve.errors import InvalidRequest, StorageFull, Unavailable

if TYPE_CHECKING:
    import torch

FAMILIES = ("llama", "qwen2", "qwen3")  # model_type of config.json
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def check_model(folder: Path) -> dict[str, Any]:
    """Read config.json of a model that can be adapted. Raises InvalidRequest for any other, and Unavailable
    without the packages for training."""
    if find_spec("peft") is None:
        raise Unavailable(
            "Training needs peft.", hint="Install it: pip install 'ragserve[train]'.", code="extra_missing"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{folder} is no model folder: config.json cannot be read ({type(error).__name__}).",
            hint="Give a folder with config.json, the weights and the tokenizer.",
        ) from None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default"))
    if kind not in FAMILIES or scaled != "default":
        found = f"rope of type {scaled}" if kind in FAMILIES else f"type {kind}"
        raise InvalidRequest(
            f"{folder} has {found}; only models of the types {', '.join(FAMILIES)} with plain rotary "
            "positions can be adapted.",
            hint="Qwen2.5, Qwen3, Llama 2 and SmolLM2 are such models.",
        )
    if config.get("quantization_config"):
        raise InvalidRequest(
            f"{folder} has quantised weights.", hint="Adapt the unquantised model, then quantise the result."
        )
    if config.get("use_sliding_window"):
        raise InvalidRequest(f"{folder} attends in a sliding window.", hint="Give a model without one.")
    if not any(path for each in WEIGHTS[:2] for path in folder.glob(each)):
        raise InvalidRequest(f"{folder} has no weights.", hint="Download the complete model again.")
    return dict(config)


def weight_bytes(folder: Path) -> int:
    """Bytes of a folder's weights."""
    return sum(path.stat().st_size for each in WEIGHTS[:2] for path in folder.glob(each))


def digest_of(folder: Path) -> str:
    """SHA-256 of a model's configuration, tokenizer and weights, 16 hex digits."""
    found = hashlib.sha256()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    paths = [path for path in map(folder.joinpath, names) if path.exists()]
    for path in [*paths, *sorted(path for each in WEIGHTS[:2] for path in folder.glob(each))]:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def pack_room(room: int) -> int:
    """Tokens of a pack; ``room``: those asked for, 0 for what suits the machine."""
    import torch

    room = room or (8192 if torch.cuda.is_available() else 2048)
    return room + -room % 128


@dataclass(eq=False)
class AdaptedModel:
    """A causal model, its tokenizer, and the adapter once `add_adapter` has been called.

    ``ends``: tokens that end an answer. ``prefix``: token ids that documents are prefilled behind. ``room``:
    tokens of a pack, to which FlexAttention's are padded. ``no_flex``: why masks are used; empty for
    FlexAttention."""

    causal: Any
    tokenizer: Any
    device: torch.device
    ends: frozenset[int]
    prefix: list[int]
    room: int
    no_flex: str
    adapter: Any = None
    _saved: Any = None
    _layers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        attend_packed(self.causal)

    @classmethod
    def load(cls, folder: Path, prefix: Sequence[int], tokenizer: Any, *, room: int = 0) -> AdaptedModel:
        """Load a folder onto the GPU, if there is one, with frozen weights of 16 bits where the machine
        computes with them. ``room``: 0 for what suits the machine."""
        import torch
        from transformers import AutoModelForCausalLM

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        name = "bfloat16" if device.type == "cuda" else cpu_dtype()[0]
        try:
            causal: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, name), attn_implementation="sdpa", local_files_only=True
            )
        except MemoryError:
            raise
        except Exception as error:  # each form of weights has errors of its own
            if "can't allocate memory" in str(error):
                raise
            why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            raise InvalidRequest(
                f"The weights of {folder} cannot be read: {why.rstrip('.')}.",
                hint="Download the complete model again.",
            ) from error
        causal.to(device).eval().requires_grad_(False)
        ends = causal.generation_config.eos_token_id
        ends = {*ends} if isinstance(ends, list) else {ends}
        ends = {*ends, tokenizer.eos_token_id} - {None}
        found = cls(causal, tokenizer, device, frozenset(ends), list(prefix), pack_room(room), "")
        found.no_flex = flex_differs(causal, device, max(1024, found.padded))
        return found

    @property
    def padded(self) -> int:
        """Tokens of a pack for FlexAttention, which is compiled for each number of them."""
        return self.room + len(self.prefix) + -len(self.prefix) % 128

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        config = self.causal.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * size * self.causal.dtype.itemsize)

    def add_adapter(self, rank: int, seed: int) -> None:
        """Add an adapter that changes nothing yet, in float32, computed in the model's dtype. Activations
        are saved at layers' ends only, but on a GPU until its memory is full (`save_memory`)."""
        import torch
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
        self.adapter = get_peft_model(self.causal, config)
        self._layers = [module for _, module in _low_rank_layers(self.causal)]
        for layer in self._layers:
            layer.cast_input_dtype_enabled = False  # to float32: a copy of each input; `run` has autocast
        if self.device.type != "cuda":
            self.save_memory()

    def save_memory(self) -> bool:
        """Compute layers again in the backward pass from now on. Returns whether it is new."""
        if self.causal.is_gradient_checkpointing:
            return False
        self.causal.gradient_checkpointing_enable({"use_reentrant": False})
        return True

    def parameters(self) -> dict[str, torch.Tensor]:
        """The adapter's weights by name."""
        return {name: value for name, value in self.causal.named_parameters() if value.requires_grad}

    @contextmanager
    def base(self) -> Iterator[None]:
        """While it lasts, the model is the one without its adapter."""
        # peft's disable_adapter looks through the whole model each time: 75 ms for one of 1.5B parameters
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a forward and its backward pass."""
        self.causal.train()
        try:
            yield
        finally:
            self.causal.eval()

    def pack(self, sequences: Sequence[TrainingSequence]) -> PackedSequences:
        """Pack sequences as the model computes them."""
        found = packed(sequences, self.prefix)
        if not self.no_flex:
            found.pad(self.padded)
        return found

    def run(self, pack: PackedSequences, *, keep: bool = False) -> tuple[torch.Tensor, PackedAttention, Any]:
        """Run a pack: hidden states [tokens, hidden], its attention, and all layers' cache with ``keep``."""
        attention = PackedAttention(pack, self.causal.model.rotary_emb, self.device, flex=not self.no_flex)
        with self.autocast():
            output = self.causal.model(
                input_ids=attention.ids, position_ids=attention.positions, use_cache=keep, packed=attention
            )
        return output.last_hidden_state[0], attention, output.past_key_values

    def autocast(self) -> AbstractContextManager[Any]:
        """Computes the adapter in the model's dtype, where it has 16 bits."""
        import torch

        dtype = self.causal.dtype
        return torch.autocast(self.device.type, dtype) if dtype.itemsize == 2 else nullcontext()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [..., vocabulary]."""
        found: torch.Tensor = self.causal.lm_head(hidden).float()
        return found

    def round_adapter(self, dtype: str) -> None:
        """Round the adapter to a dtype, so that what is merged is what is saved."""
        import torch

        self._saved = getattr(torch, dtype)
        with torch.no_grad():
            for value in self.parameters().values():
                value.copy_(value.to(self._saved))

    def save_adapter(self, folder: Path, base: str) -> None:
        """Write the adapter, as peft loads it onto ``base``, in the dtype that it was rounded to."""
        from peft import get_peft_model_state_dict

        config = replace(
            self.adapter.peft_config["default"], base_model_name_or_path=base, inference_mode=True
        )
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        state = {name: each.to(self._saved) for name, each in get_peft_model_state_dict(self.adapter).items()}
        write_tensors(folder / "adapter_model.safetensors", state)  # whose errors name a full disk

    def merge(self, base: Path, out: Path) -> None:
        """Write ``base`` with the adapter's changes, added in float32 and rounded once, to the folder
        ``out``. The model is that one afterwards. Raises StorageFull."""
        import torch
        from transformers import AutoModelForCausalLM

        changes = {
            name: module.get_delta_weight("default").float().cpu()
            for name, module in _low_rank_layers(self.causal)
        }
        computed = self.causal.dtype
        self.adapter, self._layers = None, []
        self.causal = None  # frees the GPU before the merged model comes
        merged: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
        with torch.no_grad():
            for name, change in changes.items():
                weight = merged.get_submodule(name).weight
                weight.copy_(weight.float() + change)
        try:
            merged.save_pretrained(out)
        except Exception as error:
            if "No space left" not in str(error):
                raise
            raise StorageFull(
                f"The disk of {out} is full.", hint="Free some space and run the same command again."
            ) from error
        attend_packed(merged)
        self.causal = merged.to(self.device, computed).eval().requires_grad_(False)


def _low_rank_layers(causal: Any) -> Iterator[tuple[str, Any]]:
    for name, module in causal.named_modules():
        if hasattr(module, "get_delta_weight"):
            yield name, module
