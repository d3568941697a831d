"""Where a request's KV is, if not on the device alone."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow


@dataclass(slots=True)
class OffloadState:
    """A request's place between device and host. Changed by its methods only.

    Its life: it begins to be copied (`begin`) or waits with its KV on the host (`wait`), is admitted
    (`admit`), enters a pass with what it waited with (`enter`), and leaves when it ends or is retracted
    (`leave`), which may let it wait again.

    Attributes:
        row: None for a request whose KV is on the device.
        prefix: KV on the host of a request that waits to be admitted with it, or has been and has had no pass
            since; None for others.
    """

    row: OffloadedRow | None = None
    prefix: HostPrefix | None = None

    def begin(self, row: OffloadedRow | None) -> None:
        """Its prompt is copied to the host from now on. None: the bounds do not allow it yet."""
        self.row = row

    def wait(self, prefix: HostPrefix | None) -> None:
        """It waits with its KV on the host; None: it waits without."""
        self.prefix = prefix

    def admit(self, row: OffloadedRow | None) -> None:
        """It is admitted with what it waits with; None: it is not."""
        self.row = row

    def enter(self) -> HostPrefix:
        """Return what it waited with, for its first pass.

        Raises:
            IntegrityError: it did not wait.
        """
        prefix, self.prefix = self.prefix, None
        if prefix is None:
            raise IntegrityError("an offloaded request is extended, and was not admitted as one")
        return prefix

    def leave(self) -> OffloadedRow | None:
        """Return what it had, to be freed: it ends or is retracted."""
        row, self.row, self.prefix = self.row, None, None
        return row


@dataclass(slots=True)
class SegmentedPrompt:
    """Of a prompt that may be prefilled by segments. Written by `segmented_prefill`.

    Attributes:
        whole: the prompt, while SGLang sees its last token only: it is larger than the pool, and its prefill
            has not begun.
        segmented: it is prefilled by segments, or has been.
    """

    whole: array[int] | None = None
    segmented: bool = False
