"""Retrieval as a primitive inside SGLang frontend programs.

    from ragserve.programs import Rag  # before sglang: its import then also works without CUDA
    import sglang as sgl

    rag = Rag("http://127.0.0.1:30000", namespace="default")

    @sgl.function
    def ask(s, question):
        rag.context(s, question, k=4)
        rag.answer(s, question, "answer")

    sgl.set_default_backend(rag.endpoint())
    print(ask.run("Which ocean surrounds Jan Mayen?")["answer"])

Importing this package imports neither torch nor sglang.
"""

from ragserve.programs._sglang import prepare_on_import
from ragserve.programs.rag import Context, Rag

__all__ = ["Context", "Rag"]

prepare_on_import()
