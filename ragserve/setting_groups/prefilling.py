"""How long prompts are prefilled."""

from __future__ import annotations

from pydantic import BaseModel

from sglang_ext.wire import prefill_options
from sglang_ext.wire.prefill_options import PrefillOptions

PREFILL = PrefillOptions()  # defaults of the settings below


class PrefillSettings(BaseModel):
    """Defaults of sparse prefill; the options of a request say what each is."""

    prefill_mode: prefill_options.PrefillMode = PREFILL.mode
    prefill_alpha: prefill_options.Alpha = PREFILL.alpha
    prefill_observe: prefill_options.Observe = PREFILL.observe
    prefill_dense_last: prefill_options.DenseLast = PREFILL.dense_last
    prefill_dense_below: prefill_options.DenseBelow = PREFILL.dense_below
