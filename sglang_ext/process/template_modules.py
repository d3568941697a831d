"""Importing this imports what SGLang's processes need of other packages, for `template`."""

import gc
import importlib
import signal

from sglang_ext.cpu.torchvision import prepare
from sglang_ext.process.parent import end_with_parent
from sglang_ext.sglang_internals.imports import with_sklearn, without_sklearn

MODULES = (
    "torch._functorch.aot_autograd",
    "torchvision.io",
    "transformers.generation.candidate_generator",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.llama.modeling_llama",
    "compressed_tensors.config",
    "openai.types.realtime",
    "openai.types.responses",
    "IPython.display",
    "aiohttp.web",
    "fastapi",
    "pydantic_settings",
    "requests",
    "triton",
    "uvicorn",
    "xgrammar",
)

signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the server's to handle
end_with_parent()
gc.disable()  # for good: all of it stays
without_sklearn()
prepare()
for _name in MODULES:
    importlib.import_module(_name)
with_sklearn()
gc.freeze()
